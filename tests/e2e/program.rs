//! The program as a person meets it: started, asked, killed, and started again.

use std::process::Output;

use serde_json::{Value, json};
use threadgate_tests::{Postgres, Process, eventually, ports, process};

/// A running `threadgate dev` on a folder of its own.
struct Dev {
    process: Process,
    base: String,
    folder: tempfile::TempDir,
    http: reqwest::Client,
}

impl Dev {
    async fn start() -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), ports::free_port()).await
    }

    async fn start_in(folder: tempfile::TempDir, port: u16) -> Self {
        let listen = format!("127.0.0.1:{port}");
        let data = folder.path().to_str().unwrap();
        let process = Process::threadgate(&["dev", "--listen", &listen, "--data-dir", data], &[]);
        process.wait_for_log("Try it:").await;
        let http = threadgate_tests::client::http();
        Self { process, base: format!("http://{listen}"), folder, http }
    }

    /// SIGKILL, and the same again on the same files.
    async fn restart_after_kill(mut self) -> Self {
        self.process.kill_9();
        let port = self.base.rsplit(':').next().unwrap().parse().unwrap();
        Self::start_in(self.folder, port).await
    }

    /// Runs a client command against it.
    fn command(&self, arguments: &[&str]) -> Output {
        threadgate(&[arguments, &["--server", &self.base]].concat())
    }
}

fn threadgate(arguments: &[&str]) -> Output {
    process::command("threadgate").args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[tokio::test]
async fn dev_serves_a_graph_without_services_and_says_how_to_ask_it() {
    let mut dev = Dev::start().await;
    let greeting = dev.process.log();
    assert!(greeting.contains(&dev.base) && greeting.contains("Graphs: hello"), "{greeting}");

    let body = greeting.split("-d '").nth(1).unwrap().split('\'').next().unwrap().to_owned();
    let url = format!("{}/v1/graph/invoke", dev.base);
    assert!(greeting.contains(&url), "{greeting}");
    let answer = dev.http.post(url).header("content-type", "application/json").body(body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let answer: Value = answer.json().await.unwrap();
    assert_eq!(answer["data"]["messages"][0]["role"], "user");
    assert_eq!(answer["data"]["messages"].as_array().unwrap().last().unwrap()["role"], "assistant");

    dev.process.terminate();
    assert!(dev.process.wait().await.success());
}

#[tokio::test]
async fn a_run_outlives_the_death_of_the_only_process() {
    let dev = Dev::start().await;
    let created = dev.command(&["run", "hello", "--input", "slow, please", "--no-wait"]);
    let run = stdout(&created).trim().to_owned();
    eventually("the slow node to run", async || {
        let why = stdout(&dev.command(&["runs", "why", &run]));
        if why.contains("answer") { Ok(()) } else { Err(why) }
    })
    .await;

    let dev = dev.restart_after_kill().await;

    let ended = eventually("the run to end", async || {
        let run: Value = serde_json::from_slice(&dev.command(&["runs", "get", &run, "--json"]).stdout).unwrap();
        if run["status"] == "completed" { Ok(run) } else { Err(run["status"].clone()) }
    })
    .await;
    let said = ended["state"]["context"].as_array().unwrap();
    let greetings = said.iter().filter(|message| message["content"][0]["text"].as_str().unwrap().starts_with("Hello!"));
    assert_eq!(greetings.count(), 1, "a finished node does not run again");
}

#[tokio::test]
async fn every_kind_of_outcome_has_its_exit_code() {
    let dev = Dev::start().await;
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.yaml");
    std::fs::write(&broken, "name: broken\nentry: nowhere\nnodes: {}\n").unwrap();
    let code = |output: &Output| output.status.code().unwrap();

    let completed = dev.command(&["run", "hello", "--input", "joke"]);
    assert_eq!((code(&completed), stdout(&completed).lines().last()), (0, Some("completed")));
    let too_few_steps = dev.command(&["run", "hello", "--input", "joke", "--recursion-limit", "2"]);
    assert_eq!(code(&too_few_steps), 1);
    assert!(stderr(&too_few_steps).contains("RECURSION_001"), "{}", stderr(&too_few_steps));
    assert_eq!(code(&dev.command(&["run", "hello", "--no-such-flag"])), 2);
    let unknown = dev.command(&["run", "no-such-graph", "--input", "x"]);
    assert_eq!(code(&unknown), 3);
    assert!(stderr(&unknown).contains("hello"), "it names the graphs there are: {}", stderr(&unknown));
    let no_thread = dev.command(&["fix", "no-such-thread"]);
    assert_eq!(code(&no_thread), 3);
    assert!(stderr(&no_thread).contains("no-such-thread"), "{}", stderr(&no_thread));
    let data = folder.path().join("data");
    let no_graph = ["dev", "--listen", "127.0.0.1:0", "--graph", "nope", "--data-dir", data.to_str().unwrap()];
    let no_graph = threadgate(&no_graph);
    assert_eq!(code(&no_graph), 3);
    assert!(stderr(&no_graph).contains("choose one of: hello"), "{}", stderr(&no_graph));
    let unreachable = threadgate(&["runs", "--server", "http://127.0.0.1:9"]);
    assert_eq!(code(&unreachable), 4);
    assert!(stderr(&unreachable).contains("threadgate dev"), "{}", stderr(&unreachable));
    let mistakes = threadgate(&["graph", "check", broken.to_str().unwrap()]);
    assert_eq!(code(&mistakes), 3);
    assert!(stdout(&mistakes).contains("broken.yaml:"), "{}", stdout(&mistakes));
}

#[tokio::test]
async fn machines_get_json_and_nobody_gets_colours_in_a_pipe() {
    let dev = Dev::start().await;

    let run = dev.command(&["run", "hello", "--input", "joke", "--json"]);
    let run: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(run["status"], "completed");

    let followed = dev.command(&["run", "hello", "--input", "joke", "--json", "--follow"]);
    let events: Vec<Value> = stdout(&followed).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.last().unwrap()["event"], "run_ended");
    assert!(events.iter().any(|event| event["event"] == "delta"), "streamed replies come in pieces");

    let list = stdout(&dev.command(&["runs"]));
    assert!(list.contains(run["run_id"].as_str().unwrap()) && !list.contains('\x1b'), "{list}");
}

#[tokio::test]
async fn a_second_process_on_the_same_files_is_refused() {
    let dev = Dev::start().await;

    let data = dev.folder.path().to_str().unwrap();
    let second = threadgate(&["dev", "--listen", "127.0.0.1:0", "--data-dir", data]);

    assert_eq!(second.status.code(), Some(6));
    assert!(stderr(&second).contains("in use by another process"), "{}", stderr(&second));
}

#[tokio::test]
async fn roles_refuse_a_database_without_the_schema_and_say_what_to_run() {
    let database = Postgres::shared().await.empty_database().await;
    let storage = ["--database-url", &database.url, "--redis-url", "redis://127.0.0.1:9"];

    for role in ["api", "worker", "scheduler"] {
        let refused = threadgate(&[&[role], &storage[..]].concat());
        assert_eq!(refused.status.code(), Some(6), "{role}: {}", stderr(&refused));
        assert!(stderr(&refused).contains("threadgate migrate"), "{role}: {}", stderr(&refused));
    }

    let migrated = threadgate(&["migrate", "--database-url", &database.url]);
    assert!(migrated.status.success(), "{}", stderr(&migrated));
    let again = threadgate(&["migrate", "--database-url", &database.url]);
    assert!(again.status.success(), "{}", stderr(&again));
}

#[tokio::test]
async fn graphs_are_registered_from_files_and_listed() {
    let database = Postgres::shared().await.database().await;
    let folder = tempfile::tempdir().unwrap();
    let graph = json!({"name": "echo", "entry": "say", "nodes": {"say": {"kind": "set", "say": "{{ user_text }}"}},
        "edges": [{"from": "say", "to": "__end__"}]});
    std::fs::write(folder.path().join("echo.json"), graph.to_string()).unwrap();

    let pushed = threadgate(&["graph", "push", folder.path().to_str().unwrap(), "--database-url", &database.url]);
    assert!(pushed.status.success(), "{}", stderr(&pushed));

    let listed = stdout(&threadgate(&["graph", "list", "--database-url", &database.url]));
    assert!(listed.lines().any(|line| line.starts_with("echo ") && line.contains("d-")), "{listed}");
}

#[tokio::test]
async fn no_password_reaches_the_help_or_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("threadgate.yaml");
    std::fs::write(&file, "database_url: postgres://ann:hush@127.0.0.1:9/runs\nredis_url: redis://:hush@127.0.0.1:9\n")
        .unwrap();
    let file = file.to_str().unwrap();

    let help = threadgate(&["worker", "--help", "--config", file]);
    let failed = threadgate(&["worker", "--config", file]);

    assert_eq!(failed.status.code(), Some(6));
    for output in [help, failed] {
        let text = stdout(&output) + &stderr(&output);
        assert!(!text.contains("hush"), "{text}");
    }
}

/// The commands of the README's "Tools and approvals": approve, deny, answer twice, answer late.
#[tokio::test]
async fn a_reader_approves_denies_and_answers_too_late() {
    let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/refund.yaml");
    let folder = tempfile::tempdir().unwrap();
    let listen = format!("127.0.0.1:{}", ports::free_port());
    let data = folder.path().join("data");
    let arguments =
        ["dev", "--graphs", examples.to_str().unwrap(), "--listen", &listen, "--data-dir", data.to_str().unwrap()];
    let process = Process::threadgate(&arguments, &[]);
    process.wait_for_log("Try it:").await;
    let http = threadgate_tests::client::http();
    let dev = Dev { process, base: format!("http://{listen}"), folder, http };
    let code = |output: &Output| output.status.code().unwrap();
    let paused = || {
        let run = dev.command(&["run", "refund", "--input", "Refund order 7", "--json"]);
        assert_eq!(code(&run), 5, "{}", stderr(&run));
        let run: Value = serde_json::from_slice(&run.stdout).unwrap();
        let list = dev.command(&["interrupts", "--run", run["run_id"].as_str().unwrap(), "--json"]);
        let list: Value = serde_json::from_slice(&list.stdout).unwrap();
        let question = &list["interrupts"][0];
        assert_eq!(question["arguments"], serde_json::json!({"order": 7, "amount": 40}));
        let text = |name: &str| question[name].as_str().unwrap().to_owned();
        (text("id"), text("thread_id"))
    };

    let (approved, thread) = paused();
    assert!(stdout(&dev.command(&["interrupts"])).contains(&format!("threadgate approve {approved}")));
    let too_much = dev.command(&["approve", &approved, "--arguments", r#"{"order": 7, "amount": 400}"#]);
    assert_eq!(code(&too_much), 3);
    assert!(stderr(&too_much).contains("INTERRUPT_002"), "{}", stderr(&too_much));
    let answered = dev.command(&["approve", &approved, "--arguments", r#"{"order": 7, "amount": 30}"#, "--json"]);
    assert_eq!(code(&answered), 0, "{}", stderr(&answered));
    let answered: Value = serde_json::from_slice(&answered.stdout).unwrap();
    let wait = format!("{}/v1/runs/{}/wait?timeout=30", dev.base, answered["run_id"].as_str().unwrap());
    let run: Value = dev.http.get(wait).send().await.unwrap().json().await.unwrap();
    assert_eq!(run["status"], "completed", "{run}");
    let context = run["state"]["context"].to_string();
    assert!(context.contains(r#""refunded":true"#) && context.contains(r#""amount":30"#), "{context}");
    let twice = dev.command(&["approve", &approved]);
    assert_eq!(code(&twice), 3);
    assert!(stderr(&twice).contains("INTERRUPT_001"), "{}", stderr(&twice));
    assert!(!thread.is_empty());

    let (denied, _) = paused();
    assert_eq!(code(&dev.command(&["deny", &denied, "--comment", "not today"])), 0);

    let (late, thread) = paused();
    assert_eq!(code(&dev.command(&["stop", "--thread", &thread])), 0);
    assert_eq!(code(&dev.command(&["approve", &late])), 3);
    let shown = stdout(&dev.command(&["interrupts", &late]));
    assert!(shown.contains("cancelled"), "{shown}");
    assert_eq!(stdout(&dev.command(&["interrupts"])).trim(), "Nothing waits for an answer.");
}
