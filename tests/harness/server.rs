//! A server process of our own: started in its folder, faulted by its process id, stopped on drop.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::folder::Folder;
use crate::wait::eventually;

/// One running (or killed) server.
#[derive(Debug)]
pub struct Server {
    /// Its folder; also where its log is.
    pub folder: Folder,
    program: PathBuf,
    arguments: Vec<String>,
    ending: Signal,
    child: Child,
}

impl Server {
    /// Starts `program` in `folder`, to be ended by `ending`; whether it answers is for the caller
    /// to find out.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(folder: Folder, program: PathBuf, arguments: Vec<String>, ending: Signal) -> Self {
        let child = spawn(&folder, &program, &arguments);
        Self { folder, program, arguments, ending, child }
    }

    /// Starts the server again after it was stopped, with the same arguments.
    pub fn start_again(&mut self) {
        self.child = spawn(&self.folder, &self.program, &self.arguments);
    }

    /// Waits until `answers` does.
    ///
    /// # Errors
    /// The server's log if it ended instead.
    pub async fn ready<E: std::fmt::Debug>(
        &mut self,
        mut answers: impl AsyncFnMut() -> Result<(), E>,
    ) -> Result<(), String> {
        let child = &mut self.child;
        let ended = eventually("a server to answer", async || match child.try_wait() {
            Ok(Some(status)) => Ok(Some(status)),
            _ => answers().await.map(|()| None),
        })
        .await;
        match ended {
            None => Ok(()),
            Some(status) => Err(format!("the server ended with {status}:\n{}", self.log())),
        }
    }

    /// Sends a signal: `KILL`, `STOP`, `CONT`, `INT` (Postgres: at once, but clean).
    pub fn signal(&mut self, signal: Signal) {
        send_signal(&mut self.child, signal);
    }

    /// Sends `signal` and waits for the end.
    ///
    /// # Panics
    /// If the process cannot be waited for.
    pub fn stop(&mut self, signal: Signal) {
        self.signal(signal);
        self.child.wait().expect("the server is our child");
    }

    /// What the server wrote.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(log_path(&self.folder)).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
        self.stop(self.ending);
    }
}

/// Sends `signal` to a child; one that ended already is what most callers want.
pub(crate) fn send_signal(child: &mut Child, signal: Signal) {
    // An ended child is reaped here, so that its number, free again, is never signalled.
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a child has a process id");
    let _ = kill_process(pid, signal);
}

fn log_path(folder: &Folder) -> PathBuf {
    folder.path().join("server.log")
}

fn spawn(folder: &Folder, program: &Path, arguments: &[String]) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(log_path(folder)).expect("the folder is ours");
    let errors = log.try_clone().expect("a file can be shared");
    let mut command: Command = folder.command(program);
    let child = command.args(arguments).stdout(Stdio::from(log)).stderr(Stdio::from(errors)).spawn();
    let child = child.unwrap_or_else(|error| panic!("could not start {}: {error}", program.display()));
    folder.holds(child.id());
    child
}
