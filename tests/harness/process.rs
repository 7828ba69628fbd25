//! Real child processes of the program, for the faults that only a process can have.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::Signal;

use crate::server::send_signal;
use crate::wait::{LIMIT, eventually, eventually_within};

/// A child process with its captured output; killed on drop.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Process {
    /// Starts the program `threadgate` with `arguments` and `environment`.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn threadgate(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::start("threadgate", arguments, environment)
    }

    /// Starts the same program with the test graphs built in.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn fixture(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::start("threadgate-fixture", arguments, environment)
    }

    fn start(program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = command(program);
        command.args(arguments).envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("could not start {program}: {error}"));
        let log = Arc::default();
        capture(child.stdout.take().expect("stdout is piped"), &log);
        capture(child.stderr.take().expect("stderr is piped"), &log);
        Self { name: format!("{program} {}", arguments.join(" ")), child, log }
    }

    /// What it wrote so far, both streams as they came.
    #[must_use]
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until it has written `text`.
    pub async fn wait_for_log(&self, text: &str) {
        let what = format!("'{}' to write '{text}'", self.name);
        eventually(&what, async || {
            let log = self.log();
            if log.contains(text) { Ok(()) } else { Err(log) }
        })
        .await;
    }

    /// Waits for its end by itself.
    pub async fn wait(&mut self) -> ExitStatus {
        self.wait_within(LIMIT).await
    }

    /// Waits for its end by itself, at most for `limit`.
    pub async fn wait_within(&mut self, limit: Duration) -> ExitStatus {
        let what = format!("'{}' to end", self.name);
        let Self { child, log, .. } = self;
        eventually_within(limit, &what, async || match child.try_wait().expect("it is our child") {
            Some(status) => Ok(status),
            None => Err(log.lock().unwrap_or_else(PoisonError::into_inner).clone()),
        })
        .await
    }

    /// SIGKILL, and its end.
    ///
    /// # Panics
    /// If the process cannot be waited for.
    pub fn kill_9(&mut self) {
        send_signal(&mut self.child, Signal::KILL);
        self.child.wait().expect("it is our child");
    }

    /// SIGTERM: the polite end begins.
    pub fn terminate(&mut self) {
        send_signal(&mut self.child, Signal::TERM);
    }

    /// SIGSTOP: it stands still until [`Process::thaw`].
    pub fn freeze(&mut self) {
        send_signal(&mut self.child, Signal::STOP);
    }

    /// SIGCONT: it goes on.
    pub fn thaw(&mut self) {
        send_signal(&mut self.child, Signal::CONT);
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.kill_9();
        }
        if std::thread::panicking() {
            eprintln!("--- output of '{}':\n{}", self.name, self.log());
        }
    }
}

/// A program built beside the tests, with an environment that no shell configures.
#[must_use]
pub fn command(program: &str) -> Command {
    let mut command = Command::new(built(program));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("THREADGATE_")) {
        command.env_remove(name);
    }
    command.env("NO_COLOR", "1");
    command
}

/// Where cargo put a program: beside the folder of the test binaries.
fn built(program: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a process knows its program");
    let folder = test.parent().filter(|folder| folder.ends_with("deps")).and_then(|deps| deps.parent());
    let path = folder.unwrap_or_else(|| test.parent().expect("a program is in a folder")).join(program);
    assert!(path.exists(), "{} is not built; run: cargo build --workspace --bins", path.display());
    path
}

/// Appends what comes out of `stream` to `log`, on a thread that ends with the stream.
fn capture(stream: impl Read + Send + 'static, log: &Arc<Mutex<String>>) {
    let log = Arc::clone(log);
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            log.lock().unwrap_or_else(PoisonError::into_inner).push_str(&String::from_utf8_lossy(&line));
            line.clear();
        }
    });
}
