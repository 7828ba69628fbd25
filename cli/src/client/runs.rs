//! `threadgate runs` and `threadgate stop`: what runs are there, how one does, and ending it.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{ServerArgs, pretty, shown};
use crate::exit::{Exit, Failure};
use crate::print::{self, Paint, table};

/// `threadgate runs`.
#[derive(Debug, Args)]
pub struct RunsArgs {
    #[command(subcommand)]
    command: Option<RunsCommand>,
    #[command(flatten)]
    list: ListArgs,
}

#[derive(Debug, Subcommand)]
enum RunsCommand {
    /// Lists runs, newest first.
    List(ListArgs),
    /// Shows one run.
    Get(OneArgs),
    /// Says in one sentence why a run does not move.
    Why(OneArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    /// Only runs of these statuses, separated by commas.
    #[arg(long, value_name = "STATUS")]
    status: Option<String>,
    /// Only runs of this graph.
    #[arg(long, value_name = "NAME")]
    graph: Option<String>,
    /// Only runs of this thread.
    #[arg(long, value_name = "ID")]
    thread: Option<String>,
    /// Runs at most.
    #[arg(long, default_value_t = 20, value_name = "NUMBER")]
    limit: u32,
    /// The cursor that the page before ended with.
    #[arg(long, value_name = "TEXT")]
    cursor: Option<String>,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Debug, Args)]
struct OneArgs {
    /// The run's id.
    run: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// `threadgate stop`.
#[derive(Debug, Args)]
pub struct StopArgs {
    /// The run's id.
    #[arg(required_unless_present = "thread", conflicts_with = "thread")]
    run: Option<String>,
    /// Stops whatever runs on this thread.
    #[arg(long, value_name = "ID")]
    thread: Option<String>,
    /// Waits so many seconds for the end of the node that runs now.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait: u32,
    #[command(flatten)]
    server: ServerArgs,
}

/// Lists runs, or shows one.
///
/// # Errors
/// As the server says.
pub async fn runs(args: RunsArgs) -> Result<(), Failure> {
    match args.command {
        None => list(args.list).await,
        Some(RunsCommand::List(args)) => list(args).await,
        Some(RunsCommand::Get(args)) => get(args).await,
        Some(RunsCommand::Why(args)) => why(args).await,
    }
}

async fn list(args: ListArgs) -> Result<(), Failure> {
    let filters = [("status", args.status), ("graph", args.graph), ("thread_id", args.thread), ("cursor", args.cursor)];
    let mut query: Vec<(&str, String)> = filters.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    query.push(("limit", args.limit.to_string()));
    let page = args.server.connect()?.get(&["v1", "runs"], &query).await?;
    if args.server.json {
        print::line(pretty(&page));
        return Ok(());
    }
    let paint = Paint::for_stdout();
    let runs = page["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let cells = |run: &Value| ["run_id", "graph", "thread_id", "created_at"].map(|name| shown(&run[name])).to_vec();
    let rows: Vec<Vec<String>> = runs.iter().map(cells).collect();
    let lines = table(&["RUN", "GRAPH", "THREAD", "CREATED"], &rows);
    for (number, line) in lines.lines().enumerate() {
        let status = number.checked_sub(1).map(|at| shown(&runs[at]["status"]));
        let status = status.map_or_else(|| format!("{:11}", "STATUS"), |status| paint.status(&status, 11));
        print::line(format!("{status}  {line}"));
    }
    if let Some(cursor) = page["next_cursor"].as_str() {
        print::line(paint.dim(format!("more: threadgate runs --cursor {cursor}")));
    }
    Ok(())
}

async fn get(args: OneArgs) -> Result<(), Failure> {
    let run = args.server.connect()?.get(&["v1", "runs", &args.run], &[]).await?;
    if args.server.json {
        print::line(pretty(&run));
        return Ok(());
    }
    let names = ["run_id", "status", "graph", "graph_version", "thread_id", "resumes"];
    let times = ["created_at", "started_at", "finished_at"];
    for name in names.into_iter().chain(times).filter(|name| !run[*name].is_null()) {
        print::line(format!("{:14} {}", name.replace('_', " "), shown(&run[name])));
    }
    if let Some(message) = run["error"]["message"].as_str() {
        print::line(format!("{:14} {message} ({})", "error", shown(&run["error"]["code"])));
    }
    Ok(())
}

async fn why(args: OneArgs) -> Result<(), Failure> {
    let answer = args.server.connect()?.get(&["v1", "runs", &args.run, "why"], &[]).await?;
    print::line(if args.server.json { pretty(&answer) } else { shown(&answer["why"]) });
    Ok(())
}

/// Stops a run, or whatever runs on a thread.
///
/// # Errors
/// As the server says; a thread on which nothing ever ran is refused.
pub async fn stop(args: StopArgs) -> Result<(), Failure> {
    let server = args.server.connect()?;
    if let Some(thread) = &args.thread {
        let answer = server.post(&["v1", "graph", "stop"], &json!({"thread_id": thread})).await?;
        let answer = &answer["data"];
        if args.server.json {
            print::line(pretty(answer));
        }
        return match (&answer["ok"], &answer["running"]) {
            (Value::Bool(false), _) => {
                Err(Failure::new(Exit::Refused, format!("nothing ever ran on thread '{thread}'")))
            }
            _ if args.server.json => Ok(()),
            (_, Value::Bool(true)) => {
                print::line("The stop is recorded; no further node starts.");
                Ok(())
            }
            _ => {
                print::line("Nothing runs on the thread; the stop is recorded.");
                Ok(())
            }
        };
    }
    let run = args.run.unwrap_or_default();
    let query = [("wait", args.wait.to_string())];
    let request = server.request(reqwest::Method::POST, &["v1", "runs", &run, "stop"], &query);
    let answer = server.answer(request).await?;
    if args.server.json {
        print::line(pretty(&answer));
    } else {
        let status = shown(&answer["status"]);
        let goes_on = matches!(status.as_str(), "queued" | "running" | "waiting");
        let more = if goes_on { "; the stop is recorded, and no further node starts" } else { "" };
        print::line(format!("{}{more}", Paint::for_stdout().status(&status, 0)));
    }
    Ok(())
}
