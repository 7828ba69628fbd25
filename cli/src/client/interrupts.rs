//! `threadgate interrupts`, `approve`, `deny` and `answer`: what waits for a person, and the decision.

use clap::Args;
use serde_json::{Map, Value, json};

use super::{ServerArgs, pretty, shown};
use crate::exit::{Exit, Failure};
use crate::print::{self, Paint};

/// `threadgate interrupts`.
#[derive(Debug, Args)]
pub struct InterruptsArgs {
    /// Shows this one only.
    id: Option<String>,
    /// Only questions of these statuses (open, answered, cancelled, expired), separated by commas, or all.
    #[arg(long, value_name = "STATUS", default_value = "open")]
    status: String,
    /// Only questions of this thread.
    #[arg(long, value_name = "ID")]
    thread: Option<String>,
    /// Only questions of this paused run.
    #[arg(long, value_name = "ID")]
    run: Option<String>,
    /// Only questions of this graph.
    #[arg(long, value_name = "NAME")]
    graph: Option<String>,
    /// Only questions about calls of this tool.
    #[arg(long, value_name = "NAME")]
    tool: Option<String>,
    /// Questions at most.
    #[arg(long, default_value_t = 20, value_name = "NUMBER")]
    limit: u32,
    /// The cursor that the page before ended with.
    #[arg(long, value_name = "TEXT")]
    cursor: Option<String>,
    #[command(flatten)]
    server: ServerArgs,
}

/// `threadgate approve`.
#[derive(Debug, Args)]
pub struct ApproveArgs {
    /// The question's id, as `threadgate interrupts` shows it.
    id: String,
    /// Runs the tool with these arguments instead, a JSON object; only where the tool allows it.
    #[arg(long, value_name = "JSON")]
    arguments: Option<String>,
    #[command(flatten)]
    rest: DecisionArgs,
}

/// `threadgate deny`.
#[derive(Debug, Args)]
pub struct DenyArgs {
    /// The question's id, as `threadgate interrupts` shows it.
    id: String,
    #[command(flatten)]
    rest: DecisionArgs,
}

/// `threadgate answer`.
#[derive(Debug, Args)]
pub struct AnswerArgs {
    /// The question's id, as `threadgate interrupts` shows it.
    id: String,
    /// The answer: JSON, or else taken as text.
    value: String,
    #[command(flatten)]
    rest: DecisionArgs,
}

#[derive(Debug, Args)]
struct DecisionArgs {
    /// What to say about it; of a denial the model reads it.
    #[arg(long, value_name = "TEXT")]
    comment: Option<String>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Lists what waits for a person, oldest first.
///
/// # Errors
/// As the server says.
pub async fn interrupts(args: InterruptsArgs) -> Result<(), Failure> {
    let server = args.server.connect()?;
    if let Some(id) = &args.id {
        let question = server.get(&["v1", "interrupts", id], &[]).await?;
        if args.server.json {
            print::line(pretty(&question));
        } else {
            show(&question);
        }
        return Ok(());
    }
    let filters = [("thread_id", args.thread), ("run_id", args.run), ("graph", args.graph), ("tool", args.tool)];
    let filters = filters.into_iter().chain([("cursor", args.cursor)]);
    let mut query: Vec<(&str, String)> = filters.filter_map(|(name, value)| Some((name, value?))).collect();
    query.extend([("status", args.status), ("limit", args.limit.to_string())]);
    let page = server.get(&["v1", "interrupts"], &query).await?;
    if args.server.json {
        print::line(pretty(&page));
        return Ok(());
    }
    let found = page["interrupts"].as_array().map(Vec::as_slice).unwrap_or_default();
    if found.is_empty() {
        print::line("Nothing waits for an answer.");
    }
    for (number, question) in found.iter().enumerate() {
        if number > 0 {
            print::line("");
        }
        show(question);
    }
    if let Some(cursor) = page["next_cursor"].as_str() {
        print::line(Paint::for_stdout().dim(format!("more: threadgate interrupts --cursor {cursor}")));
    }
    Ok(())
}

/// One question, and the commands that answer it.
fn show(question: &Value) {
    let paint = Paint::for_stdout();
    let id = shown(&question["id"]);
    let status = shown(&question["status"]);
    print::line(format!("{}  {status}", paint.bold(&id)));
    let asked = match &question["message"] {
        Value::Null => shown(&question["reason"]),
        message => shown(message),
    };
    print::line(format!("  {asked}"));
    if let Some(confirm) = question["metadata"]["x-confirm"].as_str() {
        print::line(format!("  {confirm}"));
    }
    let lines = [
        "tool",
        "arguments",
        "value",
        "thread_id",
        "node",
        "created_at",
        "expires_at",
        "answered_by",
        "answer",
        "comment",
    ];
    for name in lines.into_iter().filter(|name| !question[*name].is_null()) {
        print::line(format!("  {:11} {}", name.replace('_', " "), shown(&question[name])));
    }
    if status == "open" {
        print::line(paint.dim(format!("  {}", how_to_answer(question))));
    }
}

/// The command that answers a question.
pub(super) fn how_to_answer(question: &Value) -> String {
    let id = shown(&question["id"]);
    match question["kind"].as_str() {
        Some("input") if question["reason"] == "approval" => {
            format!("threadgate approve {id}    or    threadgate deny {id} --comment '…'")
        }
        Some("gate") => format!("threadgate approve {id}    or    threadgate deny {id} --comment '…'"),
        Some("outcome") => format!(r#"threadgate answer {id} '{{"action":"retry"}}'    or done, failed"#),
        _ => format!("threadgate answer {id} '…'"),
    }
}

/// Lets a gated tool run, or says yes to an `approval` node.
///
/// # Errors
/// As the server says; [`Exit::Usage`] if the arguments are no JSON.
pub async fn approve(args: ApproveArgs) -> Result<(), Failure> {
    let mut body = Map::from_iter([("outcome".to_owned(), json!("approved"))]);
    if let Some(text) = &args.arguments {
        let arguments: Value = serde_json::from_str(text)
            .map_err(|error| Failure::new(Exit::Usage, format!("--arguments is no JSON: {error}")))?;
        body.insert("arguments".to_owned(), arguments);
    }
    decide(&args.id, body, args.rest).await
}

/// Keeps a gated tool from running, or says no to an `approval` node.
///
/// # Errors
/// As the server says.
pub async fn deny(args: DenyArgs) -> Result<(), Failure> {
    decide(&args.id, Map::from_iter([("outcome".to_owned(), json!("denied"))]), args.rest).await
}

/// Answers a question of a node, or about a call whose outcome is unknown.
///
/// # Errors
/// As the server says.
pub async fn answer(args: AnswerArgs) -> Result<(), Failure> {
    let value = serde_json::from_str(&args.value).unwrap_or(Value::String(args.value));
    decide(&args.id, Map::from_iter([("value".to_owned(), value)]), args.rest).await
}

async fn decide(id: &str, mut body: Map<String, Value>, args: DecisionArgs) -> Result<(), Failure> {
    body.extend(args.comment.map(|comment| ("comment".to_owned(), comment.into())));
    let path = ["v1", "interrupts", id, "answer"];
    let answered = args.server.connect()?.post(&path, &Value::Object(body)).await?;
    if args.server.json {
        print::line(pretty(&answered));
        return Ok(());
    }
    let open = answered["still_open"].as_array().map(Vec::as_slice).unwrap_or_default();
    match answered["run_id"].as_str() {
        Some(run) => print::line(format!("Recorded; run {run} goes on.")),
        None => {
            let ids: Vec<String> = open.iter().map(shown).collect();
            print::line(format!("Recorded; the run waits for {} more: {}", ids.len(), ids.join(", ")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_question_names_its_command() {
        let of = |kind: &str| how_to_answer(&json!({"id": "int_1", "kind": kind}));

        assert!(of("gate").starts_with("threadgate approve int_1"));
        assert!(of("outcome").contains("retry"));
        assert!(of("input").starts_with("threadgate answer int_1"));
    }
}
