//! `threadgate run`: creates a run and waits for what becomes of it.

use std::io::Read;

use clap::Args;
use serde_json::{Map, Value, json};

use super::follow::{follow, said};
use super::{Server, ServerArgs, pretty, shown};
use crate::exit::{Exit, Failure};
use crate::print::{self, Paint};

/// Seconds that one request waits for the end; then it is looked whether the run has paused.
const WAIT_S: &str = "2";

/// Options of `threadgate run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The graph, by its name.
    graph: String,

    /// What the run is given: JSON `{"messages": […], "state": {…}}`, or text, which is one user
    /// message. `@FILE` reads a file, `-` standard input.
    #[arg(long, short, value_name = "INPUT")]
    input: Option<String>,

    /// The thread to go on with; without it a new one.
    #[arg(long, value_name = "ID")]
    thread: Option<String>,

    /// The configuration that nodes see, a JSON object.
    #[arg(long = "run-config", value_name = "JSON", value_parser = object)]
    config: Option<Map<String, Value>>,

    /// Steps the run may take; the server's default is 25.
    #[arg(long, value_name = "NUMBER")]
    recursion_limit: Option<u32>,

    /// Shows what happens while it happens.
    #[arg(long, short)]
    follow: bool,

    /// Returns as soon as the run is accepted.
    #[arg(long, conflicts_with = "follow")]
    no_wait: bool,

    /// The same key with the same input gives the same run.
    #[arg(long, value_name = "TEXT")]
    idempotency_key: Option<String>,

    #[command(flatten)]
    server: ServerArgs,
}

/// Creates the run and shows its outcome.
///
/// # Errors
/// [`Exit::RunFailed`] or [`Exit::Paused`] for such an outcome; else why there is none.
pub async fn run(args: RunArgs) -> Result<(), Failure> {
    let server = args.server.connect()?;
    let input = args.input.as_deref().map(input).transpose()?.unwrap_or_default();
    let mut body = json!({"graph": args.graph, "input": input});
    let more = [
        ("thread_id", args.thread.map(Value::from)),
        ("config", args.config.map(Value::from)),
        ("recursion_limit", args.recursion_limit.map(Value::from)),
    ];
    for (name, value) in more {
        if let Some(value) = value {
            body[name] = value;
        }
    }
    let mut request = server.request(reqwest::Method::POST, &["v1", "runs"], &[]).json(&body);
    if let Some(key) = args.idempotency_key {
        request = request.header("idempotency-key", key);
    }
    let created = server.answer(request).await?;
    let id = shown(&created["run_id"]);
    if args.no_wait {
        let text = if args.server.json { pretty(&created) } else { id };
        print::line(text);
        return Ok(());
    }
    if !args.server.json {
        let paint = Paint::for_stdout();
        print::line(paint.dim(format!("run {id} on thread {}", shown(&created["thread_id"]))));
    }
    if args.follow {
        follow(&server, &id, args.server.json).await?;
    }
    let ended = wait(&server, &id).await?;
    match (args.server.json, args.follow) {
        (true, true) => {} // The last event said it.
        (true, false) => print::line(pretty(&ended)),
        (false, followed) => show(&ended, !followed),
    }
    outcome(&ended)
}

/// Waits until the run is closed, as often as the server lets it.
async fn wait(server: &Server, id: &str) -> Result<Value, Failure> {
    loop {
        // A paused run is closed too, but /wait would wait for its answer.
        let run = server.get(&["v1", "runs", id], &[]).await?;
        if !matches!(run["status"].as_str(), Some("waiting" | "queued" | "running")) {
            return Ok(run);
        }
        server.get(&["v1", "runs", id, "wait"], &[("timeout", WAIT_S.to_owned())]).await?;
    }
}

/// The run for a person: what it said, and its status.
fn show(run: &Value, with_messages: bool) {
    let paint = Paint::for_stdout();
    let context = run["state"]["context"].as_array().map(Vec::as_slice).unwrap_or_default();
    let asked = context.iter().rposition(|message| message["role"] == "user").map_or(0, |at| at + 1);
    for message in context[asked..].iter().filter(|_| with_messages) {
        print::line(said(message, paint));
    }
    print::line(paint.status(run["status"].as_str().unwrap_or_default(), 0));
}

/// What the shell is told of the run.
fn outcome(run: &Value) -> Result<(), Failure> {
    let status = run["status"].as_str().unwrap_or_default();
    match status {
        "completed" => Ok(()),
        "interrupted" => {
            let question = &run["state"]["execution_meta"]["interrupt_data"]["interrupt"];
            let asks = question["message"].as_str().map(|text| format!(" It asks: {text}")).unwrap_or_default();
            let how = match run["run_id"].as_str() {
                Some(run) if !question.is_null() => format!(" `threadgate interrupts --run {run}` says how to answer"),
                _ => String::new(),
            };
            Err(Failure::new(Exit::Paused, format!("the run waits for an answer.{asks}{how}")))
        }
        _ => match run["error"]["message"].as_str() {
            Some(message) => Err(Failure::new(
                Exit::RunFailed,
                format!("the run {status}: {message} ({})", shown(&run["error"]["code"])),
            )),
            None => Err(Failure::told(Exit::RunFailed)),
        },
    }
}

/// What `--input` means.
fn input(text: &str) -> Result<Value, Failure> {
    let text = match text.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path)
            .map_err(|error| Failure::new(Exit::Usage, format!("could not read the input in {path}: {error}")))?,
        None if text == "-" => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text)?;
            text
        }
        None => text.to_owned(),
    };
    if !text.trim_start().starts_with('{') {
        let message = json!({"role": "user", "content": [{"type": "text", "text": text}]});
        return Ok(json!({"messages": [message]}));
    }
    serde_json::from_str(&text).map_err(|error| Failure::new(Exit::Usage, format!("the input is not JSON: {error}")))
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_a_user_message_and_an_object_is_the_input() {
        let text = input("Say hello").unwrap_or_else(|_| panic!("text is an input"));
        assert_eq!(text["messages"][0]["content"][0]["text"], "Say hello");

        let object = input(r#"{"state": {"n": 123456789012345678901}}"#).unwrap_or_else(|_| panic!("JSON"));
        assert_eq!(object["state"]["n"].to_string(), "123456789012345678901");

        assert_eq!(input("{oops").unwrap_err().exit, Exit::Usage);
    }

    #[test]
    fn outcomes_have_exit_codes() {
        let of = |run: Value| outcome(&run).err().map(|failure| failure.exit);

        assert_eq!(of(json!({"status": "completed"})), None);
        assert_eq!(
            of(json!({"status": "failed", "error": {"message": "no", "code": "NODE_001"}})),
            Some(Exit::RunFailed)
        );
        assert_eq!(of(json!({"status": "stopped"})), Some(Exit::RunFailed));
        assert_eq!(of(json!({"status": "interrupted"})), Some(Exit::Paused));
    }
}
