//! Runs a command with a Postgres and a Redis of its own: `threadgate-services cargo nextest run`.
//! The command finds them in `TEST_DATABASE_URL` and `TEST_REDIS_URL`; both end with it.

use std::process::ExitCode;

use rustix::process::{Pid, Signal, kill_process};
use threadgate_tests::{Postgres, Redis};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        anyhow::bail!("say what to run: threadgate-services COMMAND [ARGUMENT]...");
    };
    let (postgres, redis) = tokio::join!(Postgres::private(), Redis::private());
    let mut command = Command::new(program);
    command.args(arguments).env("TEST_DATABASE_URL", &postgres.url).env("TEST_REDIS_URL", &redis.url);
    let code = run(command.spawn()?).await?;
    Ok(ExitCode::from(code))
}

/// Waits for the command; a signal to us ends the command first, and the servers after it.
async fn run(mut child: Child) -> anyhow::Result<u8> {
    // Ctrl-C reaches the whole group, the command too; a signal to us alone is handed on.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    loop {
        tokio::select! {
            status = child.wait() => return Ok(u8::try_from(status?.code().unwrap_or(1)).unwrap_or(1)),
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {
                let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
                if let Some(pid) = pid {
                    kill_process(pid, Signal::TERM)?;
                }
            }
        }
    }
}
