//! Documents that are right, documents that are wrong, and what the right ones do.

use std::path::PathBuf;

use serde_json::json;

use super::*;
use crate::graph::rehearsal::{Ended, Rehearsal};

/// Refuses `http` nodes, which need a worker.
struct NoHttp;

impl NodeFactory for NoHttp {
    fn http(&self, name: &str, _: IdKind, _: HttpSpec) -> Result<Arc<dyn Node>, GraphError> {
        Err(GraphError { code: "GRAPH_000", message: format!("'{name}' needs a worker") })
    }
}

fn examples() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

fn graph(text: &str) -> Graph {
    let checked = read("test.yaml", text);
    let manifest = checked.manifest.unwrap_or_else(|| panic!("{:#?}", checked.findings));
    build(&manifest, &NoHttp).unwrap()
}

/// The findings of a document, each as `line:column severity message; fix`.
fn findings(text: &str) -> Vec<String> {
    let short = |finding: Finding| finding.to_string().trim_start_matches("test.yaml:").to_owned();
    read("test.yaml", text).findings.into_iter().map(short).collect()
}

/// A small right document with `replace` instead of `part`.
fn with(part: &str, replace: &str) -> String {
    const RIGHT: &str = "\
name: small
fields:
  topic: {default: none, schema: {type: string}}
entry: a
nodes:
  a:
    kind: set
    values:
      topic: user_text
  b:
    kind: scripted
    replies:
      - say: hi
edges:
  - from: a
    when: state.topic == 'x'
    to: b
  - from: b
    to: __end__
";
    assert!(part.is_empty() || RIGHT.contains(part), "{part}");
    RIGHT.replace(part, replace)
}

#[test]
fn the_examples_are_right_and_satisfy_the_published_schema() {
    let schema = jsonschema::validator_for(&json_schema()).unwrap();
    let mut count = 0;

    for entry in std::fs::read_dir(examples()).unwrap() {
        let path = entry.unwrap().path();
        if !matches!(path.extension().and_then(|end| end.to_str()), Some("yaml" | "json"))
            || path.ends_with("graph.schema.json")
        {
            continue;
        }
        let checked = read_file(&path).unwrap();
        let (source, _) = Source::read(&std::fs::read_to_string(&path).unwrap());

        assert_eq!(checked.findings, [], "{}", path.display());
        assert!(checked.manifest.is_some());
        let errors: Vec<String> = schema.iter_errors(&source.json).map(|error| error.to_string()).collect();
        assert_eq!(errors, Vec::<String>::new(), "{}", path.display());
        count += 1;
    }
    assert!(count >= 1);
}

/// Writes the schema with `UPDATE_SCHEMA=1`.
#[test]
fn the_published_schema_is_the_one_of_the_types() {
    let path = examples().join("graph.schema.json");
    let current = serde_json::to_string_pretty(&json_schema()).unwrap() + "\n";
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&path, &current).unwrap();
    }

    let published = std::fs::read_to_string(&path).unwrap();

    assert_eq!(published, current, "run this test with UPDATE_SCHEMA=1 and commit examples/graph.schema.json");
}

#[test]
fn a_right_document_has_no_findings() {
    assert_eq!(findings(&with("", "")), Vec::<String>::new());
}

/// Every mistake names file, line and column, and says what to do: `part` of the right document,
/// what stands there instead, and how one finding begins.
fn each_is_explained(mistakes: &[(&str, &str, &str)]) {
    for (part, replace, expected) in mistakes {
        let found = findings(&with(part, replace));

        assert!(found.iter().any(|finding| finding.starts_with(expected)), "{replace}: {expected}\n{found:#?}");
    }
}

#[test]
fn the_wrong_shape_is_explained() {
    each_is_explained(&[
        ("entry: a", "entri: a", "4:1: error: the graph does not have a key 'entri'; did you mean 'entry'?"),
        ("name: small\n", "", "1:1: error: the graph has no 'name'; add 'name: …'"),
        ("name: small", "name: [1]", "1:7: error: name must be text, not a list; write it so"),
        ("name: small", "name: 7", "1:7: error: name must be text, not a number; put it in quotes"),
        ("name: small", "name: small\nids: integr", "2:6: error: ids cannot be \"integr\"; did you mean 'integer'?"),
        (
            "default: none",
            "defualt: none",
            "3:11: error: fields.topic does not have a key 'defualt'; did you mean 'default'?",
        ),
        ("kind: set", "kind: sett", "7:11: error: 'sett' is no kind of node; did you mean 'set'?"),
        (
            "    kind: set\n",
            "",
            "6:3: error: node 'a' does not say its kind; add 'kind: ' and one of http, set, scripted",
        ),
        (
            "kind: set",
            "kind: set\n    timeout: soon",
            "8:14: error: nodes.a.timeout is no span of time: \"soon\"; write it as 500ms, 30s or 1m 30s",
        ),
        (
            "kind: set",
            "kind: set\n    retry: {atempts: 3}",
            "8:13: error: nodes.a.retry does not have a key 'atempts'; did you mean 'attempts'?",
        ),
        ("say: hi", "say: [hi]", "13:14: error: nodes.b.replies[0].say must be text, not a list; write it so"),
        ("say: hi", "sya: hi", "13:9: error: nodes.b.replies[0] does not have a key 'sya'; did you mean 'say'?"),
    ]);
}

#[test]
fn the_wrong_syntax_is_explained() {
    each_is_explained(&[
        ("entry: a", "entry: a: b", "4:"),
        (
            "entry: a",
            "entry: &x a",
            "4:11: error: anchors and aliases are not read; write the value out where it is needed",
        ),
        (
            "entry: a",
            "entry: a\nentry: b",
            "5:1: error: 'entry' is here twice; the first is in line 4; rename or remove one",
        ),
        ("  b:\n", "  a:\n", "10:3: error: 'a' is here twice; the first is in line 6; rename or remove one"),
    ]);
}

#[test]
fn names_of_nothing_are_explained() {
    each_is_explained(&[
        ("to: b", "to: bb", "17:9: error: edges[0].to is 'bb', which is not a node; did you mean 'b'?"),
        ("to: __end__", "to: end", "19:9: error: edges[1].to is 'end', which is not a node; did you mean '__end__'?"),
        (
            "from: b",
            "from: nowhere",
            "18:11: error: edges[1].from is 'nowhere', which is not a node; there is 'a', 'b'",
        ),
        ("entry: a", "entry: x", "4:8: error: entry is 'x', which is not a node; did you mean 'a'?"),
        (
            "entry: a",
            "entry: a\ninterrupt_before: [c]",
            "5:20: error: interrupt_before[0] is 'c', which is not a node; did you mean 'a'?",
        ),
        ("say: hi", "goto: c", "13:15: error: nodes.b.replies[0].goto is 'c', which is not a node; did you mean 'a'?"),
        (
            "topic: user_text",
            "topik: user_text",
            "9:7: error: the graph has no field 'topik'; did you mean 'topic'? or declare it under 'fields'",
        ),
        (
            "say: hi",
            "fields: {context: []}",
            "13:18: error: 'context' belongs to the engine; write a field of the graph",
        ),
    ]);
}

#[test]
fn what_is_wrong_with_the_whole_is_explained() {
    each_is_explained(&[
        ("entry: a\n", "", "1:1: error: the graph has no entry point; add 'entry: ' and the first node's name"),
        (
            "  b:\n    kind",
            "  c:\n    kind: set\n  b:\n    kind",
            "10:3: error: no edge begins or ends at node 'c'; add one, or remove the node",
        ),
        ("schema: {type: string}", "schema: {type: text}", "3:3: error: the schema of field 'topic' is no JSON Schema"),
        (
            "default: none",
            "default: 1",
            "3:3: error: the default of field 'topic' does not satisfy the field's schema; change one of them",
        ),
        (
            "topic: {default: none",
            "context: {default: none",
            "3:3: error: the field 'context' belongs to the engine; give it another name",
        ),
        (
            "  a:\n    kind: set",
            "  a:\n    pool: a b\n    kind: set",
            "6:3: error: node 'a': 'a b' cannot name a pool; use 1 to 63 letters, digits, '-', '_' or '.'",
        ),
    ]);
}

#[test]
fn the_place_inside_an_expression_is_explained() {
    each_is_explained(&[
        (
            "state.topic == 'x'",
            "state.topik == 'x'",
            "16:16: error: edges[0].when: the state has no field 'topik' (at 1:6 inside it); did you mean 'topic'?",
        ),
        ("state.topic == 'x'", "\"state.topic = 'x'\"", "16:"),
        (
            "state.topic == 'x'",
            "config.hint == 'x'",
            "16:11: error: edges[0].when: there is no 'config' here (at 1:1 inside it)",
        ),
        (
            "say: hi",
            "say: 'hi {{ usr_text }}'",
            "13:21: error: nodes.b.replies[0].say: there is no 'usr_text' here (at 1:7 inside it); did you mean 'user_text'?",
        ),
        ("say: hi", "say: 'hi {{ user_text'", "13:18: error: nodes.b.replies[0].say: '{{' has no '}}'"),
    ]);
}

#[test]
fn edges_that_do_not_say_where_are_explained() {
    each_is_explained(&[
        ("to: b", "else: b", "15:5: error: the edge from 'a' does not say clearly where it leads; write 'to' alone"),
        ("when: state.topic == 'x'\n", "else: a\n", "16:11: error: 'else' needs a condition; remove it, or add 'when'"),
        (
            "when: state.topic == 'x'\n    to: b",
            "switch: state.topic",
            "15:5: error: the edge from 'a' does not say clearly",
        ),
    ]);
}

#[test]
fn what_is_probably_not_meant_is_explained() {
    each_is_explained(&[
        ("entry: a", "entry: b", "6:3: warning: no run can reach node 'a'; add an edge that leads to it, or remove it"),
        (
            "to: __end__",
            "to: __end__\n  - {from: b, to: a}",
            "20:5: warning: 'b' has an edge without condition already",
        ),
        (
            "- say: hi",
            "- say: hi\n      - say: ho",
            "13:9: warning: nodes.b.replies[0] always holds, so the replies after it are never given",
        ),
    ]);
}

#[test]
fn all_mistakes_are_told_at_once_in_the_order_of_the_file() {
    let wrong = with("to: b", "to: x").replace("topic: user_text", "topic: usr").replace("to: __end__", "to: y");

    let lines: Vec<String> =
        findings(&wrong).iter().map(|finding| finding.split(':').next().unwrap().to_owned()).collect();

    assert_eq!(lines, ["9", "17", "19"]);
}

#[test]
fn http_nodes_are_checked_and_made_by_the_worker() {
    let node = |spec: &str| {
        format!("name: n\nentry: a\nnodes:\n  a:\n    kind: http\n{spec}edges:\n  - {{from: a, to: __end__}}\n")
    };
    assert_eq!(findings(&node("    url: https://127.0.0.1:1/x\n    headers: {X-Team: a}\n")), Vec::<String>::new());
    for (spec, expected) in [
        ("", "4:3: error: nodes.a has no 'url'"),
        (
            "    url: ftp://x\n",
            "6:10: error: nodes.a.url is no address: \"ftp://x\"; begin it with http:// or https://",
        ),
        ("    url: http://x\n    method: GET\n", "7:13: error: nodes.a.method cannot be \"GET\""),
        ("    url: http://x\n    headers: {'a b': c}\n", "7:14: error: 'a b' is no header name"),
        (
            "    url: http://x\n    headers: {Host: c}\n",
            "7:14: error: the header 'Host' is set by the worker; remove it",
        ),
        ("    url: http://x\n    response_schema: {type: text}\n", "7:22: error: this is no JSON Schema"),
    ] {
        let found = findings(&node(spec));

        assert!(found.iter().any(|finding| finding.starts_with(expected)), "{expected}\n{found:#?}");
    }

    let manifest = read("n", &node("    url: http://x\n")).manifest.unwrap();
    assert_eq!(build(&manifest, &NoHttp).unwrap_err().message, "'a' needs a worker");
}

#[test]
fn json_is_read_as_well_and_numbers_are_kept_exactly() {
    let text = r#"{
	"name": "n", "entry": "a",
	"fields": {"big": {"default": 18446744073709551616}, "text": {"default": "1"}},
	"nodes": {"a": {"kind": "set", "values": {"text": "'x'"}}},
	"edges": [{"from": "a", "to": "__end__"}]
}"#;

    let manifest = read("n.json", text).manifest.unwrap();

    assert_eq!(manifest.fields[0].default.to_string(), "18446744073709551616");
    assert_eq!(manifest.fields[1].default, json!("1"));
}

#[test]
fn what_is_no_document_is_refused() {
    for (text, expected) in [
        ("", "1:1: error: the graph must be an object, not nothing"),
        ("- a\n", "1:1: error: the graph must be an object, not a list"),
        ("{", "1:"),
        ("a: b\n---\nc: d\n", "2:1: error: the file holds a second document; put it into a file of its own"),
        ("? [a]\n: b\n", "1:3: error: a key must be text; quote it"),
    ] {
        let found = findings(text);

        assert!(found[0].starts_with(expected), "{text}: {found:#?}");
    }
    let deep = "a: ".to_owned() + &"[".repeat(100) + &"]".repeat(100);
    assert!(findings(&deep)[0].contains("nests deeper"), "{:?}", findings(&deep));
    let long = "#".repeat(DOCUMENT_BYTES_MAX + 1);
    assert!(findings(&long)[0].contains("at most"), "{:?}", findings(&long));
    assert!(check(std::path::Path::new("/nowhere.yaml"))[0].message.starts_with("the file cannot be read"));
}

#[test]
fn the_version_follows_what_the_document_says() {
    let version = |text: &str| graph(text).version;

    assert_eq!(version(&with("", "")), version(&with("entry: a", "description: ignored\nentry: a # a comment")));
    assert_ne!(version(&with("", "")), version(&with("say: hi", "say: ho")));
    assert!(!version(&with("", "")).is_code());
}

#[test]
fn a_manifest_survives_the_store() {
    let graph = graph(&with("", ""));
    let stored = serde_json::to_string(&*graph.manifest).unwrap();

    let loaded = build(&serde_json::from_str(&stored).unwrap(), &NoHttp).unwrap();

    assert_eq!(loaded.version, graph.version);
    assert_eq!(loaded.manifest, graph.manifest);
}

#[test]
fn a_manifest_of_another_program_is_refused_with_its_reason() {
    let mut manifest = (*graph(&with("", "")).manifest).clone();
    manifest.nodes[0].kind = "agent".to_owned();
    let error = build(&manifest, &NoHttp).unwrap_err();
    assert!(error.message.contains("does not know nodes of kind 'agent'"), "{}", error.message);

    manifest.nodes[0].kind = "set".to_owned();
    manifest.edges[1].condition = Some("1 +".to_owned());
    assert_eq!(build(&manifest, &NoHttp).unwrap_err().code, "GRAPH_000");
}

#[test]
fn set_nodes_compute_fields_messages_and_jumps() {
    let mut thread = Rehearsal::of(graph(
        "name: n
fields: {count: {default: 1}, list: {default: []}, fixed: {}, big: {default: 18446744073709551616}, copy: {}}
entry: a
nodes:
  a:
    kind: set
    values: {count: state.count + 1, list: 'state.list + [user_text]', fixed: 7, copy: state.big}
    say: '{{ state.count }} {{ user_text }} {{ state.list }}'
    goto: 'state.count < 3 ? \"a\" : null'
edges: [{from: a, to: __end__}]
",
    ));

    assert_eq!(thread.say("hi"), Ended::Completed);

    assert_eq!(thread.ran, ["a", "a", "a"]);
    let fields = &thread.state.as_ref().unwrap().fields;
    assert_eq!(
        Json::Object(fields.clone()).to_string(),
        r#"{"count":4,"list":["hi","hi","hi"],"fixed":7,"big":18446744073709551616,"copy":18446744073709551616}"#
    );
    assert_eq!(thread.texts()[1..3], ["assistant:1 hi []", "assistant:2 hi [\"hi\"]"]);
}

#[test]
fn a_set_node_that_cannot_compute_fails_and_says_why() {
    let text = "name: n\nfields: {x: {}}\nentry: a\nnodes: {a: {kind: set, values: {x: state.x + 1}}}\nedges: [{from: a, to: __end__}]\n";

    let Ended::Failed(error) = Rehearsal::of(graph(text)).say("hi") else { panic!("it ran") };

    assert_eq!(error.code, "NODE_001");
    assert!(error.message.starts_with("Error in node 'a': the value of 'x': "), "{}", error.message);
}

#[test]
fn conditions_lead_where_they_say() {
    let graph = |edge: &str| {
        graph(&format!(
            "name: n
fields: {{x: {{}}}}
entry: a
nodes:
  a: {{kind: set, values: {{x: user_text}}}}
  b: {{kind: set}}
  c: {{kind: set}}
edges:
  - {edge}
  - {{from: b, to: __end__}}
  - {{from: c, to: __end__}}
"
        ))
    };
    for (edge, said, ran) in [
        ("{from: a, when: \"state.x == '1'\", to: b, else: c}", "1", "a b"),
        ("{from: a, when: \"state.x == '1'\", to: b, else: c}", "2", "a c"),
        ("{from: a, when: \"state.x == '1'\", to: b}", "2", "a"),
        ("{from: a, switch: state.x, cases: {'1': b, '2': c}}", "2", "a c"),
        ("{from: a, switch: size(state.x), cases: {'1': b, '2': c}}", "12", "a c"),
        ("{from: a, switch: size(state.x), cases: {'1': b}, else: c}", "123", "a c"),
        ("{from: a, route: state.x}", "c", "a c"),
        ("{from: a, route: state.x}", "__end__", "a"),
    ] {
        let mut thread = Rehearsal::of(graph(edge));

        assert_eq!(thread.say(said), Ended::Completed, "{edge}");

        assert_eq!(thread.ran.join(" "), ran, "{edge} {said}");
    }
    for (edge, code) in [
        ("{from: a, when: state.x, to: b}", "GRAPH_ROUTING_001"),
        ("{from: a, when: state.x.y == 1, to: b}", "GRAPH_ROUTING_001"),
        ("{from: a, route: state.x}", "GRAPH_007"),
    ] {
        let Ended::Failed(error) = Rehearsal::of(graph(edge)).say("nowhere") else { panic!("{edge}") };
        assert_eq!(error.code, code);
    }
}

#[test]
fn scripted_nodes_reply_by_what_was_said_and_how_often() {
    let mut thread = Rehearsal::of(graph(
        "name: n
fields: {topic: {}}
entry: a
nodes:
  a:
    kind: scripted
    replies:
      - {when: \"user_text.matches('(?i)boom')\", error: {message: kaboom, code: E_1, retryable: true}}
      - {when: visit < 3, say: '{{ visit }}', goto: a}
      - {say: done, messages: [more, {role: tool, content: [{type: tool_result, call_id: c, output: 1}]}], fields: {topic: {deep: 1}}}
edges: [{from: a, to: __end__}]
",
    ));

    assert_eq!(thread.say("go"), Ended::Completed);
    assert_eq!(thread.texts(), ["user:go", "assistant:1", "assistant:2", "assistant:done", "assistant:more", "tool:1"]);
    assert_eq!(thread.state.as_ref().unwrap().fields["topic"], json!({"deep": 1}));
    // Visits are counted anew when the user speaks again.
    assert_eq!(thread.say("again"), Ended::Completed);
    assert_eq!(thread.texts()[7], "assistant:1");
    let Ended::Failed(error) = thread.say("Boom") else { panic!("it ran") };
    assert_eq!(
        (error.code.as_str(), error.message.as_str(), error.transient),
        ("E_1", "Error in node 'a': kaboom", true)
    );
}

#[test]
fn scripted_nodes_ask_and_use_the_answer() {
    let mut thread = Rehearsal::of(graph(
        "name: n
entry: a
nodes:
  a:
    kind: scripted
    replies:
      - interrupt: {message: 'Refund?', value: {amount: 42}, response_schema: {type: boolean}}
        say: 'decision={{ answer }}'
edges: [{from: a, to: __end__}]
",
    ));

    assert_eq!(thread.say("hi"), Ended::Interrupted);
    let asked = thread.meta().interrupt_data.clone().unwrap();
    assert_eq!(asked["interrupt"]["value"], json!({"amount": 42}));
    let resume = crate::graph::admission::RunInput { resume: Some(json!(true)), ..Default::default() };
    assert_eq!(thread.invoke(resume), Ok(Ended::Completed));

    assert_eq!(thread.texts(), ["user:hi", "assistant:decision=true"]);
}

#[tokio::test(start_paused = true)]
async fn scripted_nodes_work_stream_and_end_early_when_told() {
    let graph = graph(
        "name: n
ids: integer
entry: a
nodes:
  a: {kind: scripted, replies: [{sleep: 1h, emit: {step: 1}, say: two words, stream: true}]}
edges: [{from: a, to: __end__}]
",
    );
    let thread = Rehearsal::of(graph.clone());
    let admission = thread.admit(&crate::graph::admission::RunInput {
        messages: vec![crate::domain::Message::text(crate::domain::Role::User, "hi")],
        ..Default::default()
    });
    let state = crate::domain::ThreadState {
        context: Vec::new(),
        context_summary: None,
        execution_meta: admission.unwrap().meta,
        fields: Default::default(),
    };
    let (events, mut sent) = tokio::sync::mpsc::unbounded_channel();
    let mut ctx = crate::graph::rehearsal::context(&state, "a", 1);
    ctx.events = events;

    let outcome = graph.nodes["a"].run(ctx.clone()).await.unwrap();

    let whole = &outcome.command.update.messages[0];
    assert!(whole.message_id.is_int);
    assert!(matches!(sent.recv().await, Some(crate::graph::NodeEvent::Custom(value)) if value == json!({"step": 1})));
    let mut pieces = Vec::new();
    while let Ok(crate::graph::NodeEvent::Delta(piece)) = sent.try_recv() {
        assert!(piece.delta && piece.message_id == whole.message_id);
        pieces.push(piece.plain_text());
    }
    assert_eq!(pieces, ["two ", "words"]);

    ctx.cancelled.cancel();
    let ended = graph.nodes["a"].run(ctx).await.unwrap_err();
    assert!(matches!(ended, crate::graph::NodeError::Failed { code, .. } if code == "NODE_CANCELLED"));
}

#[test]
fn hello_answers_everything_it_offers() {
    let manifest = read_file(&examples().join("hello.yaml")).unwrap().manifest.unwrap();
    for (said, answer) in [
        ("tell me a joke", "lease was on the other side"),
        ("please count", "3!"),
        ("slow, please", "That took three seconds"),
        ("something else", "You said: something else"),
    ] {
        let mut thread = Rehearsal::of(build(&manifest, &NoHttp).unwrap());

        assert_eq!(thread.say(said), Ended::Completed);

        let texts = thread.texts();
        assert!(texts[1].starts_with("assistant:Hello!"), "{texts:?}");
        assert!(texts.iter().any(|text| text.contains(answer)), "{texts:?}");
        assert!(texts.last().unwrap().contains("That was turn 1"), "{texts:?}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    /// Whatever a file holds, it is read to its end: a manifest that can be built, or a finding.
    #[test]
    fn any_text_is_read_or_explained(text in "[a-z:{}\\[\\]&*|>'\"#\\-? \n\t\u{0}é]{0,60}") {
        let checked = read("any", &text);

        proptest::prop_assert!(checked.manifest.is_some() || checked.findings.iter().any(Finding::is_error));
    }

    /// A damaged document is never taken for something that cannot be built.
    #[test]
    fn a_damaged_document_is_read_or_explained(
        from in 0..600usize,
        length in 0..40usize,
        put in "[a-z:{}'\"\\- \n(!]{0,8}",
    ) {
        let right: Vec<char> = with("", "").chars().collect();
        let from = from.min(right.len());
        let end = (from + length).min(right.len());
        let text: String = right[..from].iter().chain(put.chars().collect::<Vec<_>>().iter()).chain(&right[end..]).collect();

        match read("damaged", &text).manifest {
            Some(manifest) => proptest::prop_assert!(build(&manifest, &NoHttp).is_ok(), "{text}"),
            None => proptest::prop_assert!(!read("damaged", &text).findings.is_empty()),
        }
    }
}
