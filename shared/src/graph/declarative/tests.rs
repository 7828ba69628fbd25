//! Documents that are right, documents that are wrong, and what the right ones do.

use std::path::PathBuf;

use serde_json::json;

use super::*;

/// Refuses `http` nodes, which need a worker.
pub(super) struct NoHttp;

impl NodeFactory for NoHttp {
    fn http(&self, name: &str, _: IdKind, _: HttpSpec) -> Result<Arc<dyn Node>, GraphError> {
        Err(GraphError { code: "GRAPH_000", message: format!("'{name}' needs a worker") })
    }

    fn tool(&self, name: &str, _: HttpToolSpec) -> Result<Arc<dyn Tool>, GraphError> {
        Err(GraphError { code: "GRAPH_000", message: format!("'{name}' needs a worker") })
    }
}

pub(super) fn examples() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

pub(super) fn graph(text: &str) -> Graph {
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
pub(super) fn with(part: &str, replace: &str) -> String {
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

/// A document whose node `t` has these tools.
fn with_tools(tools: &str) -> String {
    format!(
        "name: g\nentry: t\nnodes:\n  t:\n    kind: tools\n    tools:\n{tools}edges: [{{ from: t, to: __end__ }}]\n"
    )
}

#[test]
fn mistakes_about_tools_have_their_place() {
    let found = |tools: &str| findings(&with_tools(tools));

    assert_eq!(found("      - { name: a, returns: 1 }\n"), [""; 0]);
    for (tools, place, part) in [
        ("      - { name: a }\n", "7:9", "in 0 ways"),
        ("      - { name: a, returns: 1, remote: true }\n", "7:9", "in 2 ways"),
        ("      - { name: a, handoff: nowhere }\n", "7:29", "'nowhere', which is not a node"),
        ("      - { name: a, retuns: 1 }\n", "7:20", "did you mean 'returns'"),
        ("      - { name: a b, returns: 1 }\n", "4:3", "cannot name a tool"),
        ("      - { name: a, returns: 1, parameters: { type: 5 } }\n", "", "JSON Schema"),
        ("      - { name: a, returns: 1, timeout: 5 }\n", "", "timeout"),
    ] {
        let found = found(tools);
        assert_eq!(found.len(), 1, "{tools}{found:?}");
        assert!(found[0].starts_with(place) && found[0].contains(part), "{found:?}");
    }
}

#[test]
fn tools_of_a_document_become_tools_of_the_manifest() {
    let tools =
        "      - { name: pay, effect: once, timeout: 2s, expires_in: 1h, on_expiry: denied, returns: { paid: true } }
      - { name: locate, remote: true }
      - { name: transfer_to_end, handoff: __end__ }
    guard: { enabled: true, require_approval: [pay], approval_prompts: { pay: 'Really?' } }
    concurrency: 2
";
    let graph = graph(&with_tools(tools));

    let set = &graph.tools["t"];
    let pay = set.spec().tool("pay").unwrap();
    assert_eq!((pay.effect, pay.timeout), (crate::domain::Effect::Once, Some(std::time::Duration::from_secs(2))));
    assert_eq!(pay.on_expiry, Some(json!({"outcome": "denied"})));
    assert!(set.code("pay").is_some() && set.code("locate").is_none());
    assert_eq!((set.spec().concurrency, set.spec().guard.enabled), (2, true));
    assert!(crate::graph::tools::guard::is_gated(set.spec(), pay));
    let of_manifest: ToolsSpec = serde_json::from_value(graph.manifest.nodes[0].spec.clone()).unwrap();
    assert_eq!(&of_manifest, set.spec(), "what admission reads is what runs");
}

#[test]
fn an_approval_node_goes_on_by_the_decision() {
    let text = "name: g
fields: { decision: {}, amount: { default: 42 } }
entry: ask
nodes:
  ask: { kind: approval, message: 'Pay {{ state.amount }}?', approved: pay, field: decision, expires_in: 1h, on_expiry: denied }
  pay: { kind: scripted, replies: [{ say: paid }] }
edges: [{ from: pay, to: __end__ }, { from: ask, to: __end__ }]
";
    for (answer, last) in
        [(json!({"approved": true}), "assistant:paid"), (json!({"approved": false, "reason": "no"}), "user:hi")]
    {
        let mut thread = crate::graph::rehearsal::Rehearsal::of(graph(text));
        assert_eq!(thread.say("hi"), crate::graph::rehearsal::Ended::Interrupted);
        let question = &thread.open[0].question;
        assert_eq!((question.message.as_deref(), question.reason.as_str()), (Some("Pay 42?"), "approval"));
        assert_eq!(question.on_expiry, Some(json!({"approved": false})));
        let resume = |answer: Json| crate::graph::admission::RunInput { resume: Some(answer), ..Default::default() };
        for wrong in [json!(true), json!({"approved": "yes"}), json!(null)] {
            assert!(thread.admit(&resume(wrong)).is_err(), "only the boolean decides");
        }

        let ended = thread.invoke(resume(answer.clone())).unwrap();

        assert_eq!(ended, crate::graph::rehearsal::Ended::Completed);
        assert_eq!(thread.texts().last().map(String::as_str), Some(last));
        assert_eq!(thread.state.as_ref().unwrap().fields["decision"], answer);
    }
}

#[test]
fn mistakes_about_an_approval_have_their_place() {
    let with = |more: &str| {
        format!(
            "name: g\nentry: a\nnodes:\n  a: {{ kind: approval, message: 'x', {more} }}\nedges: [{{ from: a, to: __end__ }}]\n"
        )
    };

    for (more, part) in
        [("approved: b", "'b', which is not a node"), ("field: f", "no field 'f'"), ("on_expiry: maybe", "maybe")]
    {
        let found = findings(&with(more));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains(part), "{found:?}");
    }
}
