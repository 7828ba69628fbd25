//! `threadgate threads` and `threadgate fix`: conversations and their states.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::follow::said;
use super::{ServerArgs, pretty, shown};
use crate::exit::{Exit, Failure};
use crate::print::{self, Paint, table};

/// `threadgate threads`.
#[derive(Debug, Args)]
pub struct ThreadsArgs {
    #[command(subcommand)]
    command: Option<ThreadsCommand>,
    #[command(flatten)]
    list: ListArgs,
}

#[derive(Debug, Subcommand)]
enum ThreadsCommand {
    /// Lists threads in order of creation.
    List(ListArgs),
    /// Shows a thread's record.
    Get(OneArgs),
    /// Shows a thread's state: its messages, fields and place.
    State(OneArgs),
    /// Deletes a thread with its messages and runs.
    Delete(OneArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    /// Only threads in which any value holds this text.
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
    /// Threads at most.
    #[arg(long, default_value_t = 20, value_name = "NUMBER")]
    limit: u32,
    /// Threads to leave out.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    offset: u32,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Debug, Args)]
struct OneArgs {
    /// The thread's id.
    thread: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// `threadgate fix`.
#[derive(Debug, Args)]
pub struct FixArgs {
    /// The thread's id.
    thread: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Lists threads, or works on one.
///
/// # Errors
/// As the server says; [`Exit::Refused`] for a thread that does not exist.
pub async fn threads(args: ThreadsArgs) -> Result<(), Failure> {
    match args.command {
        None => list(args.list).await,
        Some(ThreadsCommand::List(args)) => list(args).await,
        Some(ThreadsCommand::Get(args)) => get(args).await,
        Some(ThreadsCommand::State(args)) => state(args).await,
        Some(ThreadsCommand::Delete(args)) => delete(args).await,
    }
}

async fn list(args: ListArgs) -> Result<(), Failure> {
    let mut query = vec![("limit", args.limit.to_string()), ("offset", args.offset.to_string())];
    query.extend(args.search.map(|text| ("search", text)));
    let answer = args.server.connect()?.get(&["v1", "threads"], &query).await?;
    let threads = &answer["data"]["threads"];
    if args.server.json {
        print::line(pretty(threads));
        return Ok(());
    }
    let cells = |thread: &Value| ["thread_id", "thread_name", "updated_at"].map(|name| shown(&thread[name])).to_vec();
    let rows: Vec<Vec<String>> = threads.as_array().into_iter().flatten().map(cells).collect();
    print::line(table(&["THREAD", "NAME", "UPDATED"], &rows));
    Ok(())
}

async fn get(args: OneArgs) -> Result<(), Failure> {
    let answer = args.server.connect()?.get(&["v1", "threads", &args.thread], &[]).await?;
    let thread = &answer["data"]["thread_data"]["thread"];
    let thread = known(thread, &args.thread)?;
    if args.server.json {
        print::line(pretty(thread));
        return Ok(());
    }
    for (name, value) in thread.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        print::line(format!("{:12} {}", name.replace('_', " "), shown(value)));
    }
    Ok(())
}

async fn state(args: OneArgs) -> Result<(), Failure> {
    let answer = args.server.connect()?.get(&["v1", "threads", &args.thread, "state"], &[]).await?;
    let state = known(&answer["data"]["state"], &args.thread)?;
    if args.server.json {
        print::line(pretty(state));
        return Ok(());
    }
    let paint = Paint::for_stdout();
    for message in state["context"].as_array().into_iter().flatten() {
        print::line(said(message, paint));
    }
    let meta = &state["execution_meta"];
    print::line(paint.dim(format!(
        "at {} ({}), step {}",
        shown(&meta["current_node"]),
        shown(&meta["status"]),
        meta["step"]
    )));
    let own = |name: &str| !matches!(name, "context" | "context_summary" | "execution_meta");
    for (name, value) in state.as_object().into_iter().flatten().filter(|(name, _)| own(name)) {
        print::line(format!("{} {value}", paint.bold(format!("{name} ="))));
    }
    Ok(())
}

async fn delete(args: OneArgs) -> Result<(), Failure> {
    let answer = args.server.connect()?.delete(&["v1", "threads", &args.thread]).await?;
    if args.server.json {
        print::line(pretty(&answer["data"]));
    }
    if answer["data"]["data"] == false {
        return Err(unknown(&args.thread));
    }
    if !args.server.json {
        print::line(format!("Deleted thread '{}'.", args.thread));
    }
    Ok(())
}

/// Drops messages with unanswered calls from a thread's context, so that it can go on.
///
/// # Errors
/// As the server says.
pub async fn fix(args: FixArgs) -> Result<(), Failure> {
    let answer = args.server.connect()?.post(&["v1", "graph", "fix"], &json!({"thread_id": args.thread})).await?;
    let data = &answer["data"];
    if args.server.json {
        print::line(pretty(data));
    }
    if data["success"] == false {
        return Err(unknown(&args.thread));
    }
    if args.server.json {
        return Ok(());
    }
    match data["removed_count"].as_u64() {
        Some(0) | None => print::line("Nothing to fix: every call in the thread's context is answered."),
        Some(count) => print::line(format!("Removed {count} messages with unanswered calls.")),
    }
    Ok(())
}

fn known<'a>(value: &'a Value, thread: &str) -> Result<&'a Value, Failure> {
    if value.is_null() { Err(unknown(thread)) } else { Ok(value) }
}

fn unknown(thread: &str) -> Failure {
    Failure::new(Exit::Refused, format!("thread '{thread}' does not exist, or has no state; see `threadgate threads`"))
}
