//! What is expected instead, where the recording shows a fault of the reference (`peer_bug.better`).

use anyhow::Result;
use serde_json::{Value, json};

use super::compare::{difference, header_difference};
use super::{Answer, Case, Target};

/// The first difference between the recording of `case`, its faults mended, and `answer`.
pub(super) fn check(case: &Case, answer: &Answer, target: &Target) -> Result<Option<String>> {
    let better = &case.json["peer_bug"]["better"];
    let mut recorded = case.json.clone();
    own_names(&mut recorded, target);
    if better.is_null() {
        return compare(&recorded, answer);
    }
    let behaviour = better["behaviour"].as_str().or(better["note"].as_str()).unwrap_or_default();
    if behaviour.starts_with("decision D6") {
        return Ok(observed(&recorded["body"], &answer.json()));
    }
    if behaviour.starts_with("count steps per run") {
        return Ok(error_difference(500, Some("RECURSION_001"), None, answer));
    }
    if behaviour.starts_with("use the graph's state type") {
        let state = &mut recorded["body"]["data"]["state"];
        state["execution_meta"]["thread_id"] =
            json!(case.json["request"]["path"].as_str().unwrap_or_default().split('/').nth(3));
        state["topic"] = json!("none");
        state["visits"] = json!([]);
        return compare(&recorded, answer);
    }
    if behaviour.starts_with("decision D2") {
        finished_before_the_stop(&mut recorded);
        return compare(&recorded, answer);
    }
    if let Some(body) = better.get("body") {
        recorded["body"] = body.clone();
        recorded["status"] = better["status"].clone();
        return compare(&recorded, answer);
    }
    if better.get("code").is_some() {
        let status = better["status"].as_u64().unwrap_or_default();
        return Ok(error_difference(status, better["code"].as_str(), better.get("details"), answer));
    }
    if better.get("status").is_some() {
        let (status, expected) = (u64::from(answer.status), better["status"].as_u64().unwrap_or_default());
        return Ok((status != expected).then(|| format!("status {status}, better {expected}")));
    }
    mend(&mut recorded, better);
    if behaviour.is_empty() && better.get("body.data.run.status").is_some() {
        return Ok(observed(&recorded["body"], &answer.json()));
    }
    if let Some(is_new) = better.get("meta.is_new_thread") {
        let answered = answer.json()["data"]["meta"]["is_new_thread"].clone();
        if answered != *is_new {
            return Ok(Some(format!("/data/meta/is_new_thread: {answered}, better {is_new}")));
        }
    }
    compare(&recorded, answer)
}

/// Names of the reference's own classes stand for ours.
fn own_names(recorded: &mut Value, target: &Target) {
    if let Some(name) = recorded.pointer_mut("/body/data/info/checkpointer_type") {
        *name = json!(target.checkpointer_type);
    }
}

fn compare(recorded: &Value, answer: &Answer) -> Result<Option<String>> {
    let status = recorded["status"].as_u64().unwrap_or_default();
    if u64::from(answer.status) != status {
        let body = String::from_utf8_lossy(&answer.body);
        return Ok(Some(format!("status {}, recorded {status}; body {body:.400}", answer.status)));
    }
    if let Some(why) = header_difference(&recorded["headers"], &answer.headers) {
        return Ok(Some(why));
    }
    if let Some(body) = recorded.get("body") {
        return Ok(difference(body, &answer.json()));
    }
    if let Some(text) = recorded["body_text"].as_str() {
        let answered = String::from_utf8_lossy(&answer.body);
        return Ok((answered != text).then(|| format!("body {answered:?}, recorded {text:?}")));
    }
    match recorded.get("sse") {
        Some(chunks) => Ok(difference(chunks, &Value::Array(answer.chunks()?))),
        None => Ok(None),
    }
}

/// An error in the envelope: status, code and, where named, the place of each detail.
fn error_difference(status: u64, code: Option<&str>, details: Option<&Value>, answer: &Answer) -> Option<String> {
    let body = answer.json();
    if u64::from(answer.status) != status || body["error"]["code"].as_str() != code {
        return Some(format!(
            "{} {}, better {status} {}",
            answer.status,
            body["error"]["code"],
            code.unwrap_or_default()
        ));
    }
    let expected: Vec<&Value> = details?.as_array()?.iter().map(|detail| &detail["loc"]).collect();
    let answered: Vec<&Value> = body["error"]["details"].as_array()?.iter().map(|detail| &detail["loc"]).collect();
    (expected != answered).then(|| format!("/error/details: places {answered:?}, better {expected:?}"))
}

/// Decision D6: ids, status, usage and counts; not the reference's frozen times and merged spans.
fn observed(recorded: &Value, answered: &Value) -> Option<String> {
    let pointers = [
        "/data/thread_id",
        "/data/run_count",
        "/data/run_ids",
        "/data/run/run_id",
        "/data/run/thread_id",
        "/data/run/status",
        "/data/run/usage",
        "/data/run/llm_calls",
        "/data/run/tool_calls",
        "/data/run/spans/0/id",
        "/data/run/spans/0/kind",
        "/data/run/spans/0/name",
    ];
    pointers.iter().find_map(|pointer| {
        let null = Value::Null;
        let (expected, answer) =
            (recorded.pointer(pointer).unwrap_or(&null), answered.pointer(pointer).unwrap_or(&null));
        difference(expected, answer).map(|why| format!("{pointer}{why}"))
    })
}

/// Decision D2: the node that ran when the stop came has finished, and its output is kept.
fn finished_before_the_stop(recorded: &mut Value) {
    if let Some(state) = recorded.pointer_mut("/body/data/state").filter(|state| state.is_object()) {
        let meta = &mut state["execution_meta"];
        meta["current_node"] = json!("plan");
        meta["interrupted_node"] = json!("plan");
        meta["step"] = json!(2);
        meta["stop_current_execution"] = json!("none");
        state["visits"] = json!(["intake"]);
    }
}

/// Replaces what `better` names by a dotted path; `data.reason` is that of a stream's errors.
fn mend(recorded: &mut Value, better: &Value) {
    for (path, value) in better.as_object().into_iter().flatten() {
        if path == "data.reason" {
            for chunk in recorded["sse"].as_array_mut().into_iter().flatten().filter(|chunk| chunk["event"] == "error")
            {
                chunk["data"]["reason"] = value.clone();
                if let Some(error) = chunk.pointer_mut("/state/execution_meta/internal_data/error") {
                    *error = json!("<text>");
                }
            }
        }
        let pointer = format!("/{}", path.replace('.', "/"));
        if let Some(place) = recorded.pointer_mut(&pointer) {
            *place = value.clone();
        }
    }
}
