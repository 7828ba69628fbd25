//! Runs of the graph `bench` over HTTP, counted only if they passed through all ten nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::graph::NODES;

/// How much to send.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub(super) runs: usize,
    pub(super) concurrency: usize,
    pub(super) sleep_ms: u64,
}

/// What came of it.
#[derive(Debug, Clone)]
pub(super) struct Figures {
    pub(super) runs: usize,
    pub(super) steps_per_s: f64,
    pub(super) run_ms_p50: f64,
    pub(super) run_ms_p99: f64,
}

impl Figures {
    #[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are small")]
    pub(super) fn steps(&self) -> f64 {
        (self.runs * NODES) as f64
    }
}

/// Sends the load and waits for its end.
pub(super) async fn drive(base: &str, load: Load) -> Result<Figures> {
    let http = client()?;
    let left = Arc::new(AtomicUsize::new(load.runs));
    let begun = Instant::now();
    let mut senders = tokio::task::JoinSet::new();
    for _ in 0..load.concurrency {
        let (http, base, left) = (http.clone(), base.to_owned(), Arc::clone(&left));
        senders.spawn(async move {
            let mut times = Vec::new();
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                let begun = Instant::now();
                let run = submit(&http, &base, load.sleep_ms).await?;
                wait(&http, &base, &run).await?;
                times.push(begun.elapsed().as_secs_f64() * 1000.0);
            }
            anyhow::Ok(times)
        });
    }
    let mut times = Vec::with_capacity(load.runs);
    while let Some(sender) = senders.join_next().await {
        times.extend(sender??);
    }
    let seconds = begun.elapsed().as_secs_f64();
    times.sort_by(f64::total_cmp);
    let mut figures = Figures {
        runs: load.runs,
        steps_per_s: 0.0,
        run_ms_p50: percentile(&times, 50),
        run_ms_p99: percentile(&times, 99),
    };
    figures.steps_per_s = figures.steps() / seconds;
    Ok(figures)
}

/// The value below which `percent` of the sorted values lie.
pub(super) fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let at = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

pub(super) fn client() -> Result<reqwest::Client> {
    Ok(reqwest::Client::builder().timeout(Duration::from_secs(120)).build()?)
}

/// Creates one run on a thread of its own and returns its id.
pub(super) async fn submit(http: &reqwest::Client, base: &str, sleep_ms: u64) -> Result<String> {
    submit_on(http, base, &uuid::Uuid::new_v4().to_string(), sleep_ms).await
}

/// Creates one run on `thread` and returns its id.
pub(super) async fn submit_on(http: &reqwest::Client, base: &str, thread: &str, sleep_ms: u64) -> Result<String> {
    let body = json!({
        "graph": "bench",
        "thread_id": thread,
        "input": {
            "messages": [{"role": "user", "content": []}],
            "state": {"run": thread, "n": 0, "pad": "p".repeat(1700), "out": "", "sleep_ms": sleep_ms},
        },
    });
    let response = http.post(format!("{base}/v1/runs")).json(&body).send().await?;
    let status = response.status();
    let answer: Value = response.json().await.context("the answer to a created run")?;
    match answer["run_id"].as_str() {
        Some(run) if status.as_u16() == 202 => Ok(run.to_owned()),
        _ => bail!("POST /v1/runs answered {status}: {answer}"),
    }
}

/// Waits for the end of a run, which must have passed through every node.
pub(super) async fn wait(http: &reqwest::Client, base: &str, run: &str) -> Result<()> {
    loop {
        let answer: Value = http.get(format!("{base}/v1/runs/{run}/wait?timeout=60")).send().await?.json().await?;
        match answer["status"].as_str() {
            Some("completed") if answer["state"]["n"].as_u64() == u64::try_from(NODES).ok() => return Ok(()),
            Some("queued" | "running" | "waiting") => {}
            _ => bail!("run {run} did not end as it must: {answer}"),
        }
    }
}
