//! CPU time of processes and their children, from `/proc`.

use anyhow::{Context, Result};

/// Clock ticks per second of `/proc/<pid>/stat`; fixed for user space on Linux.
const TICKS: f64 = 100.0;

/// Seconds of CPU that the processes and their living and reaped children have used.
pub(super) fn seconds(pids: &[u32]) -> Result<f64> {
    let all = processes()?;
    let mut ticks = 0;
    for process in &all {
        if pids.contains(&process.pid) {
            ticks += process.own + process.reaped;
        } else if pids.contains(&process.parent) {
            ticks += process.own;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "ticks of a benchmark are small")]
    Ok(ticks as f64 / TICKS)
}

/// Resident memory in MiB.
pub(super) fn resident_mib(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}

struct Process {
    pid: u32,
    parent: u32,
    own: u64,
    reaped: u64,
}

fn processes() -> Result<Vec<Process>> {
    let entries = std::fs::read_dir("/proc").context("CPU is read from /proc, which Linux has")?;
    Ok(entries.flatten().filter_map(|entry| read(entry.file_name().to_str()?.parse().ok()?)).collect())
}

fn read(pid: u32) -> Option<Process> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(Process {
        pid,
        parent: u32::try_from(number(1)?).ok()?,
        own: number(11)? + number(12)?,
        reaped: number(13)? + number(14)?,
    })
}
