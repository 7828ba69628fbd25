//! A server's folder, removed with its server even when the test process dies without a word.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Waits for the end of its input, which is the end of whoever holds the folder; then stops the
/// server whose process id the folder names and removes the folder.
const GUARD: &str = r#"
    trap '' INT TERM HUP
    cat >/dev/null
    if read -r pid 2>/dev/null <"$1/server.pid"; then
        kill -INT "$pid" 2>/dev/null
        n=0
        while kill -0 "$pid" 2>/dev/null && [ "$n" -lt 100 ]; do n=$((n + 1)); sleep 0.1; done
        kill -KILL "$pid" 2>/dev/null
    fi
    rm -rf "$1"
"#;

/// A temporary folder that belongs to the account servers run as.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// The account, where it is not ours.
    pub account: Option<Account>,
    guard: Child,
}

/// Whom a server runs as: Postgres refuses root.
#[derive(Debug, Clone, Copy)]
pub struct Account {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl Folder {
    /// A new folder of mode 0700, named after `what` it is for.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn new(what: &str) -> Self {
        let path = tempfile::Builder::new().prefix(&format!("threadgate-{what}-")).tempdir().expect("a folder").keep();
        let account = server_account();
        if let Some(Account { uid, gid }) = account {
            std::os::unix::fs::chown(&path, Some(uid), Some(gid)).expect("root may give a folder away");
        }
        let guard = Command::new("sh")
            .args(["-c", GUARD, "guard"])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("sh starts");
        Self { path, account, guard }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command that runs in the folder, as the folder's account and apart from our signals.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.path).process_group(0).stdin(Stdio::null());
        if let Some(Account { uid, gid }) = self.account {
            command.uid(uid).gid(gid);
        }
        command
    }

    /// Names the process that the guard stops.
    pub fn holds(&self, pid: u32) {
        std::fs::write(self.path.join("server.pid"), format!("{pid}\n")).expect("the folder is ours");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }
}

/// The account `postgres`, or `nobody`, when we are root.
fn server_account() -> Option<Account> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let id = |flag: &str, name: &str| -> Option<u32> {
        let output = Command::new("id").args([flag, name]).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    };
    let account = |name: &str| Some(Account { uid: id("-u", name)?, gid: id("-g", name)? });
    Some(account("postgres").or_else(|| account("nobody")).expect("every system has an account that is not root"))
}
