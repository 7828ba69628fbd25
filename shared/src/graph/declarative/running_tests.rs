//! What the nodes and conditions of a document do when they run.

use serde_json::json;

use super::tests::{NoHttp, examples, graph, with};
use super::*;
use crate::graph::rehearsal::{Ended, Rehearsal};

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
    let (events, mut sent) = crate::graph::NodeEvents::channel();
    let mut ctx = crate::graph::rehearsal::context(&state, "a", 1);
    ctx.events = events;

    let outcome = graph.nodes["a"].run(ctx.clone()).await.unwrap();

    let whole = &outcome.command.update.messages[0];
    assert!(whole.message_id.is_int);
    assert!(
        matches!(sent.recv().await, Some((1, crate::graph::NodeEvent::Custom(value))) if value == json!({"step": 1}))
    );
    let mut pieces = Vec::new();
    while let Ok((_, crate::graph::NodeEvent::Delta(piece))) = sent.try_recv() {
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
