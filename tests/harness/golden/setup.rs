//! What a recording's note says was done before or beside its request, as code.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{Answer, Case, Target};

/// Does what the note asks for and sends the request of `case`.
pub(super) async fn perform(case: &Case, target: &Target) -> Result<Answer> {
    let note = case.note();
    if let Some(setup) = note.strip_prefix("setup: ") {
        // The recordings' server had done the threads' set-up before it came to their messages.
        let path = case.json["request"]["path"].as_str().unwrap_or_default();
        for _ in 0..if path.contains("/messages") { 2 } else { 1 } {
            prepare(setup, target).await.with_context(|| format!("set-up {setup:?}"))?;
        }
    }
    if note.starts_with("a stop was posted") {
        return stopped_in_the_middle(case, target).await;
    }
    if note.starts_with("sent 0.6 s into an invoke") {
        return beside_a_running_invoke(case, target).await;
    }
    target.send(case).await
}

/// Sentences like "invoke 'hello' on t-thr-1 and t-thr-2", "invoke 'boom' on t with run_id r",
/// "invoke with run_id a, then stream full with run_id b, on thread t".
async fn prepare(setup: &str, target: &Target) -> Result<()> {
    let words: Vec<&str> = setup.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    let after = |word: &str| words.iter().position(|w| *w == word).and_then(|at| words.get(at + 1)).copied();
    let text = setup.split('\'').nth(1).unwrap_or("hello");
    if let Some((_, thread)) = setup.split_once("on thread ") {
        let runs: Vec<&str> = words
            .iter()
            .enumerate()
            .filter(|(at, _)| *at > 0 && words[at - 1] == "run_id")
            .map(|(_, word)| *word)
            .collect();
        let [first, second] = runs[..] else { bail!("two run ids are named") };
        target.post("/v1/graph/invoke", &request(text, thread, Some(first))).await?;
        let mut stream = request(text, thread, Some(second));
        stream["response_granularity"] = json!("full");
        target.post("/v1/graph/stream", &stream).await?;
        return Ok(());
    }
    let mut threads = vec![after("on").context("a thread is named")?];
    threads.extend(after("and"));
    for thread in threads {
        let mut body = request(text, thread, after("run_id"));
        if let Some(limit) = after("recursion_limit") {
            body["recursion_limit"] = json!(limit);
        }
        target.post("/v1/graph/invoke", &body).await?;
    }
    Ok(())
}

fn request(text: &str, thread: &str, run_id: Option<&str>) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "config": {"thread_id": thread},
    });
    if let Some(run_id) = run_id {
        body["config"]["run_id"] = json!(run_id);
    }
    body
}

/// The case's own request, stopped once its first node runs.
async fn stopped_in_the_middle(case: &Case, target: &Target) -> Result<Answer> {
    let thread = case.json["request"]["body"]["config"]["thread_id"].as_str().context("a thread is named")?;
    let answer = target.send(case);
    let stop = async {
        running(target, thread).await?;
        target.post("/v1/graph/stop", &json!({"thread_id": thread})).await
    };
    let (answer, stop) = tokio::join!(answer, stop);
    stop?;
    answer
}

/// The case's own request, sent while another invoke's first node sleeps.
async fn beside_a_running_invoke(case: &Case, target: &Target) -> Result<Answer> {
    let thread = case.json["request"]["body"]["thread_id"].as_str().context("a thread is named")?;
    let sleeper = request("sleep:2", thread, None);
    let beside = async {
        running(target, thread).await?;
        target.send(case).await
    };
    let (sleeping, answer) = tokio::join!(target.post("/v1/graph/invoke", &sleeper), beside);
    sleeping?;
    answer
}

/// Waits until a worker runs the thread's run.
async fn running(target: &Target, thread: &str) -> Result<()> {
    let listed = async {
        loop {
            let runs = target.get(&format!("/v1/runs?thread_id={thread}&status=running")).await?.json();
            if runs["runs"].as_array().is_some_and(|runs| !runs.is_empty()) {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), listed).await.context("no run of the thread started in 20 s")?
}
