//! What expressions say, and what they are refused for.

use serde_json::json;

use super::*;
use crate::domain::ExecutionMeta;

fn state() -> ThreadState {
    ThreadState {
        context: vec![Message::text(Role::User, "a short question"), Message::text(Role::Assistant, "an answer")],
        context_summary: None,
        execution_meta: ExecutionMeta::fresh("t1"),
        fields: json!({"topic": "dogs", "count": 2, "list": [3, 1, 2], "big": 18446744073709551616_u128.to_string()})
            .as_object()
            .unwrap()
            .clone(),
    }
}

fn evaluate(text: &str) -> Result<Json, String> {
    let expression = Expression::compile(text, Place::Edge, None).map_err(|error| error.message)?;
    expression.evaluate(&Facts { state: &state(), node: None })
}

fn refused(text: &str) -> ExpressionError {
    let fields = ["topic".to_owned(), "count".to_owned()];
    Expression::compile(text, Place::Edge, Some(&fields)).unwrap_err()
}

#[test]
fn expressions_see_the_state() {
    for (text, expected) in [
        ("state.topic == 'dogs' && state.count > 1", json!(true)),
        ("state.count + 1", json!(3)),
        ("user_text.contains('short')", json!(true)),
        ("user_text.matches('(?i)SHORT')", json!(true)),
        ("last.role + ': ' + last.text", json!("assistant: an answer")),
        ("size(messages)", json!(2)),
        ("messages.filter(m, m.role == 'user').map(m, m.text)", json!(["a short question"])),
        ("thread_id", json!("t1")),
        ("meta.step", json!(0)),
        ("has(state.topic) ? state.topic : 'none'", json!("dogs")),
        ("{'b': 1, 'a': [state.topic]}", json!({"a": ["dogs"], "b": 1})),
        ("state.context_summary == null", json!(true)),
    ] {
        let value = evaluate(text);

        assert_eq!(value.map(|value| value.to_string()), Ok(expected.to_string()), "{text}");
    }
}

#[test]
fn failures_say_what_failed() {
    assert!(evaluate("state.missing").unwrap_err().contains("missing"));
    let error = evaluate("state.topic + 1").unwrap_err();
    assert!(error.contains("dogs"), "{error}");
    assert!(evaluate("1 / 0").unwrap_err().to_lowercase().contains("zero"));
}

#[test]
fn what_is_no_cel_says_where() {
    let error = refused("state.topic == ");
    assert!(error.message.starts_with("this is no CEL expression"), "{}", error.message);
    assert!(error.at.is_some());

    let error = refused("1 ==\n  )");
    assert_eq!(error.at.map(|(line, _)| line), Some(2));
}

#[test]
fn names_that_are_not_there_get_a_suggestion() {
    let error = refused("true && stat.topic == 'x'");
    assert_eq!((error.message.as_str(), error.fix.as_str()), ("there is no 'stat' here", "did you mean 'state'?"));
    assert_eq!(error.at, Some((1, 9)));

    let error = refused("state.topik == 'x'");
    assert_eq!(error.message, "the state has no field 'topik'");
    assert_eq!(error.fix, "did you mean 'topic'?");

    let error = refused("user_text.contain('x')");
    assert_eq!(
        (error.message.as_str(), error.fix.as_str()),
        ("there is no function 'contain'", "did you mean 'contains'?")
    );

    let error = refused("config.hint");
    assert!(error.fix.contains("'state', 'messages'"), "{}", error.fix);
}

#[test]
fn every_function_that_is_offered_exists() {
    let is_macro = |name: &str| ["has", "all", "exists", "exists_one", "map", "filter"].contains(&name);
    for name in FUNCTIONS.iter().filter(|name| !is_macro(name)) {
        let is_known = |text: String| {
            let error = Program::compile(&text).unwrap().execute(&Context::default()).unwrap_err().to_string();
            !error.contains("Undeclared")
        };

        assert!(is_known(format!("{name}(1, 2, 3, 4)")) || is_known(format!("''.{name}(1, 2, 3, 4)")), "{name}");
    }
}

#[test]
fn long_and_deep_expressions_are_refused() {
    assert!(refused(&"1 + ".repeat(600)).message.contains("at most 2000"));
    let depth = 900;
    refused(&format!("{}1{}", "(".repeat(depth), ")".repeat(depth)));
    refused(&format!("{}1{}", "[".repeat(depth), "]".repeat(depth)));
    for chain in ["1+".repeat(990) + "1", "1==".repeat(600) + "1", "state".to_owned() + &".a".repeat(900)] {
        assert!(refused(&chain).message.contains("24 levels"), "{chain:.20}");
    }
}

/// Evaluating recurses once per level; the deepest expression that is taken needs less than half of
/// the 2 MiB that a worker's thread has.
#[test]
fn the_deepest_expressions_fit_the_stack() {
    for (begin, end, count) in [
        ("1+", "", 23),
        ("1==", "", 23),
        ("- ", "", 23),
        ("[", "]", 23),
        ("size(", ")", 23),
        ("true?1:", "", 23),
        ("[1].map(x, ", ")", 6),
        ("[1].all(x, ", ")", 5),
        ("[1].filter(x, ", ")", 5),
    ] {
        let text = begin.repeat(count) + "true" + &end.repeat(count);
        let expression = Expression::compile(&text, Place::Edge, None).unwrap();

        let thread = std::thread::Builder::new().stack_size(1024 * 1024);
        let evaluate = move || {
            let _ = expression.evaluate(&Facts { state: &state(), node: None });
        };
        thread.spawn(evaluate).unwrap().join().unwrap();
    }
}

#[test]
fn macros_that_would_visit_too_much_are_refused_before_they_start() {
    let mut state = state();
    state.fields.insert("list".to_owned(), json!(vec![1; 1_000]));
    let evaluate = |text: &str| {
        Expression::compile(text, Place::Edge, None).unwrap().evaluate(&Facts { state: &state, node: None })
    };

    assert_eq!(evaluate("state.list.all(x, x == 1)"), Ok(json!(true)));
    assert_eq!(evaluate("size(state.list.map(x, x + 1).filter(x, x > 1))"), Ok(json!(1_000)));
    let error = evaluate("state.list.all(x, state.list.all(y, x == y))").unwrap_err();
    assert!(error.contains("at most 100000"), "{error}");
    let error = evaluate("state.list.map(x, state.list.map(y, state.list.map(z, x)))").unwrap_err();
    assert!(error.contains("at most 100000"), "{error}");
}

/// C87: a number that CEL cannot hold is moved exactly, and never calculated with in silence.
#[test]
fn big_numbers_are_moved_but_not_calculated_with() {
    let mut state = state();
    state.fields.insert("big".to_owned(), Json::Number("18446744073709551616".parse().unwrap()));
    let evaluate = |text: &str| {
        Expression::compile(text, Place::Edge, None).unwrap().evaluate(&Facts { state: &state, node: None })
    };

    assert_eq!(evaluate("[state.big]").unwrap().to_string(), "[18446744073709551616]");
    assert_eq!(evaluate("state.big == state.big"), Ok(json!(true)));
    evaluate("state.big + 1").unwrap_err();
}

#[test]
fn nodes_see_more_than_edges() {
    let config = json!({"hint": "H"}).as_object().unwrap().clone();
    let node = NodeFacts { config: &config, attempt: 2, visit: 3, answer: Some(&json!("yes")) };
    let text = "config.hint + string(attempt) + string(visit) + answer";

    let value = Expression::compile(text, Place::Node, None).unwrap();

    assert_eq!(value.evaluate(&Facts { state: &state(), node: Some(&node) }), Ok(json!("H23yes")));
}
