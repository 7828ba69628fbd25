//! The trace of a run as `GET /v1/observability/{thread_id}` shows it, from records of what happened.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::{Json, Message};

/// How many events of one run are shown; the newest stay.
pub const EVENTS_MAX: usize = 2_000;

/// One thing that happened in a run.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
pub struct Record {
    /// `message`, `updates`, `state`, `error` or `retry`.
    pub event: String,
    /// The node; empty for what belongs to none.
    pub node: String,
    /// Which visit of the node, such as the step's place in the run; records of one visit share a span.
    #[serde(default)]
    pub visit: i32,
    /// UNIX seconds.
    pub timestamp: f64,
    /// A piece of a message.
    pub is_delta: bool,
    /// The message's role.
    pub role: Option<String>,
    /// The message's token counts.
    pub usages: Option<Json>,
    /// The types of the message's blocks.
    pub content_kinds: Vec<String>,
    /// The tools the message calls.
    pub tool_names: Vec<String>,
    /// Something failed.
    pub is_error: bool,
}

/// What is known of the run beside its records.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TracedRun {
    /// The client's id of it, or ours.
    pub run_id: String,
    /// Its thread.
    pub thread_id: String,
    /// `running`, `done`, `error`, `stopped` or `interrupted`.
    pub status: String,
    /// UNIX seconds; 0 = unknown.
    pub started_at: f64,
    /// UNIX seconds.
    pub finished_at: Option<f64>,
}

/// The trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trace {
    /// See [`TracedRun::run_id`].
    pub run_id: String,
    /// See [`TracedRun::thread_id`].
    pub thread_id: String,
    /// See [`TracedRun::status`].
    pub status: String,
    /// UNIX seconds.
    pub started_at: f64,
    /// UNIX seconds.
    pub finished_at: Option<f64>,
    /// From the start to the last thing that is known.
    pub duration_ms: f64,
    /// The root, then one per visit, model call and tool call, in order of their first record.
    pub spans: Vec<Span>,
    /// Newest first.
    pub events: Vec<TraceEvent>,
    /// The sums.
    pub usage: Usage,
    /// How many spans are model calls.
    pub llm_calls: usize,
    /// How many spans are tool calls.
    pub tool_calls: usize,
    /// How many different nodes ran.
    pub iterations: usize,
}

/// A part of the run that took time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Span {
    /// `root`, then `s1`, `s2`, …
    pub id: String,
    /// `graph`, `node: <name>`, `llm.generate`, `tool: <name>`.
    pub name: String,
    /// `root`, `node`, `llm` or `tool`.
    pub kind: &'static str,
    /// The span around it.
    pub parent: Option<String>,
    /// From the run's start.
    pub start_ms: f64,
    /// How long it took; 0 where only a moment is known.
    pub duration_ms: f64,
    /// The model, where it is known.
    pub model: Option<String>,
    /// Prompt tokens of a model call.
    pub input_tokens: Option<i64>,
    /// Completion tokens of a model call.
    pub output_tokens: Option<i64>,
}

/// A moment of the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TraceEvent {
    /// `e0`, `e1`, … in order of time.
    pub id: String,
    /// See [`Record::event`].
    #[serde(rename = "type")]
    pub kind: String,
    /// The node, or nothing.
    pub node: String,
    /// From the run's start.
    pub offset_ms: f64,
    /// A few words.
    pub summary: String,
}

/// Token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Usage {
    /// What models read.
    pub prompt_tokens: i64,
    /// What models wrote.
    pub completion_tokens: i64,
    /// What models thought.
    pub reasoning_tokens: i64,
    /// All; prompt and completion where a model did not say.
    pub total_tokens: i64,
}

/// One execution of a node as it was stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Visit<'a> {
    /// The node.
    pub node: &'a str,
    /// The step's place in the run.
    pub seq: i32,
    /// When its last attempt started, in UNIX seconds.
    pub started_at: f64,
    /// When it was committed or failed; `None` while it runs.
    pub finished_at: Option<f64>,
    /// When attempts ended that did not commit, in UNIX seconds.
    pub retries: Vec<f64>,
    /// What it added to the context.
    pub messages: Vec<&'a Message>,
    /// Whether the run failed in it.
    pub failed: bool,
}

impl Record {
    /// A message, under the node that made it; nothing for what came with the input.
    #[must_use]
    pub fn message(node: &str, visit: i32, timestamp: f64, message: &Message) -> Self {
        let word = |block: &Json, name: &str| block[name].as_str().map(str::to_owned);
        let called = message.content.iter().filter(|block| block["type"] == "tool_call");
        let asked = message.tools_calls.iter().flatten().filter_map(|call| word(&call["function"], "name"));
        let blocks: Vec<String> = called.filter_map(|block| word(block, "name")).collect();
        Self {
            event: "message".to_owned(),
            node: node.to_owned(),
            visit,
            timestamp,
            role: Some(message.role.as_str().to_owned()),
            usages: message.usages.clone(),
            content_kinds: message.content.iter().filter_map(|block| word(block, "type")).collect(),
            tool_names: if blocks.is_empty() { asked.collect() } else { blocks },
            ..Self::default()
        }
    }
}

impl Visit<'_> {
    /// What happened in it, in order.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        let at = |event: &str, timestamp: f64| Record {
            event: event.to_owned(),
            node: self.node.to_owned(),
            visit: self.seq,
            timestamp,
            is_error: event == "error",
            ..Record::default()
        };
        let mut records: Vec<Record> = self.retries.iter().map(|ended| at("retry", *ended)).collect();
        records.push(at("updates", self.started_at));
        if let Some(finished) = self.finished_at {
            let said = |message: &&Message| Record::message(self.node, self.seq, finished, message);
            records.extend(self.messages.iter().map(said));
            records.push(at(if self.failed { "error" } else { "state" }, finished));
        }
        records
    }
}

/// The trace of `run` from `records`, in order of time.
#[must_use]
pub fn trace(run: TracedRun, records: &[Record]) -> Trace {
    let first = records.first().map_or(0.0, |record| record.timestamp);
    let base = if run.started_at == 0.0 { first } else { run.started_at };
    let offset = |timestamp: f64| ((timestamp - base) * 1_000.0).max(0.0);
    let end = records.iter().map(|record| record.timestamp).chain(run.finished_at).fold(base, f64::max);
    let mut spans = Spans::new(offset(end));
    let mut usage = Usage::default();
    for record in records {
        usage.add(record.usages.as_ref());
        spans.add(record, offset(record.timestamp));
    }
    let event = |(index, record): (usize, &Record)| TraceEvent {
        id: format!("e{index}"),
        kind: record.event.clone(),
        node: record.node.clone(),
        offset_ms: offset(record.timestamp),
        summary: summary(record),
    };
    let nodes: HashSet<&str> = records.iter().map(|record| record.node.as_str()).filter(|n| !n.is_empty()).collect();
    let count = |kind: &str| spans.list.iter().filter(|span| span.kind == kind).count();
    Trace {
        llm_calls: count("llm"),
        tool_calls: count("tool"),
        iterations: nodes.len(),
        duration_ms: offset(end),
        events: records.iter().enumerate().rev().take(EVENTS_MAX).map(event).collect(),
        usage,
        run_id: run.run_id,
        thread_id: run.thread_id,
        status: run.status,
        started_at: run.started_at,
        finished_at: run.finished_at,
        spans: spans.list,
    }
}

struct Spans<'a> {
    list: Vec<Span>,
    /// Place of each visit's span.
    visits: HashMap<(&'a str, i32), usize>,
}

impl<'a> Spans<'a> {
    fn new(duration_ms: f64) -> Self {
        let mut spans = Self { list: Vec::new(), visits: HashMap::new() };
        spans.push("graph".to_owned(), "root", None, 0.0);
        spans.list[0].duration_ms = duration_ms;
        spans
    }

    fn push(&mut self, name: String, kind: &'static str, parent: Option<String>, start_ms: f64) -> &mut Span {
        let id = if self.list.is_empty() { "root".to_owned() } else { format!("s{}", self.list.len()) };
        self.list.push(Span {
            id,
            name,
            kind,
            parent,
            start_ms,
            duration_ms: 0.0,
            model: None,
            input_tokens: None,
            output_tokens: None,
        });
        self.list.last_mut().expect("a span was just pushed")
    }

    fn add(&mut self, record: &'a Record, at: f64) {
        let root = || Some("root".to_owned());
        let mut parent = root();
        if !record.node.is_empty() {
            let key = (record.node.as_str(), record.visit);
            let index = self.visits.get(&key).copied().unwrap_or_else(|| {
                self.push(format!("node: {}", record.node), "node", root(), at);
                self.visits.insert(key, self.list.len() - 1);
                self.list.len() - 1
            });
            let span = &mut self.list[index];
            span.duration_ms = span.duration_ms.max(at - span.start_ms);
            parent = Some(span.id.clone());
        }
        if let Some(usages) = &record.usages {
            let span = self.push("llm.generate".to_owned(), "llm", parent.clone(), at);
            span.input_tokens = Some(tokens(usages, "prompt_tokens"));
            span.output_tokens = Some(tokens(usages, "completion_tokens"));
        }
        for tool in record.tool_names.iter().filter(|_| calls_tools(record)) {
            self.push(format!("tool: {tool}"), "tool", parent.clone(), at);
        }
    }
}

impl Usage {
    fn add(&mut self, usages: Option<&Json>) {
        let Some(usages) = usages else { return };
        let (prompt, completion) = (tokens(usages, "prompt_tokens"), tokens(usages, "completion_tokens"));
        let total = tokens(usages, "total_tokens");
        self.prompt_tokens += prompt;
        self.completion_tokens += completion;
        self.reasoning_tokens += tokens(usages, "reasoning_tokens");
        self.total_tokens += if total == 0 { prompt + completion } else { total };
    }
}

fn tokens(usages: &Json, name: &str) -> i64 {
    usages[name].as_i64().unwrap_or_default()
}

/// Whether the record's message calls tools: by blocks, or by `tools_calls` alone.
fn calls_tools(record: &Record) -> bool {
    record.content_kinds.iter().any(|kind| kind == "tool_call")
        || !record.content_kinds.iter().any(|k| k == "tool_result")
}

fn summary(record: &Record) -> String {
    if record.is_error {
        return "error".to_owned();
    }
    if !record.tool_names.is_empty() {
        let word = if calls_tools(record) { "tool_call" } else { "tool_result" };
        return format!("{word} {}", record.tool_names.join(", "));
    }
    if let Some(usages) = &record.usages {
        return format!("llm.generate · {} tokens", tokens(usages, "total_tokens"));
    }
    if record.is_delta {
        return "delta".to_owned();
    }
    match &record.role {
        Some(role) => format!("{role}: {}", record.content_kinds.join(", ")),
        None => record.event.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::domain::Role;

    fn run() -> TracedRun {
        TracedRun {
            run_id: "r".into(),
            thread_id: "t".into(),
            status: "done".into(),
            started_at: 100.0,
            finished_at: Some(110.0),
        }
    }

    /// C54: a loop has one span per visit, with its own start and duration.
    #[test]
    fn every_visit_has_a_span_of_its_own() {
        let mut said = Message::text(Role::Assistant, "hi");
        said.usages = Some(json!({"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}));
        let visit = |seq: i32, started_at: f64, finished_at: f64| Visit {
            node: "a",
            seq,
            started_at,
            finished_at: Some(finished_at),
            retries: Vec::new(),
            messages: vec![&said],
            failed: false,
        };
        let mut records = vec![Record::message("", 0, 100.0, &Message::text(Role::User, "hello"))];
        records.extend(visit(1, 101.0, 103.0).records());
        records.extend(visit(2, 104.0, 104.5).records());

        let trace = trace(run(), &records);

        let spans: Vec<_> =
            trace.spans.iter().map(|s| (s.id.as_str(), s.name.as_str(), s.start_ms, s.duration_ms)).collect();
        assert_eq!(
            spans,
            [
                ("root", "graph", 0.0, 10_000.0),
                ("s1", "node: a", 1_000.0, 2_000.0),
                ("s2", "llm.generate", 3_000.0, 0.0),
                ("s3", "node: a", 4_000.0, 500.0),
                ("s4", "llm.generate", 4_500.0, 0.0),
            ]
        );
        assert_eq!(trace.spans[4].parent.as_deref(), Some("s3"));
        assert_eq!((trace.llm_calls, trace.iterations, trace.usage.total_tokens), (2, 1, 36));
        assert_eq!(trace.events.last().unwrap().summary, "user: text");
    }

    #[test]
    fn attempts_and_failures_are_events() {
        let visit = Visit {
            node: "a",
            seq: 1,
            started_at: 105.0,
            finished_at: Some(106.0),
            retries: vec![102.0],
            messages: Vec::new(),
            failed: true,
        };

        let trace = trace(run(), &visit.records());

        let events: Vec<&str> = trace.events.iter().map(|event| event.summary.as_str()).collect();
        assert_eq!(events, ["error", "updates", "retry"]);
        assert_eq!((trace.spans[1].start_ms, trace.spans[1].duration_ms), (2_000.0, 4_000.0));
    }

    #[test]
    fn calls_without_blocks_are_seen_too() {
        let mut message = Message::text(Role::Assistant, "");
        message.tools_calls = Some(vec![json!({"id": "c", "function": {"name": "search", "arguments": "{}"}})]);

        let trace = trace(run(), &[Record::message("a", 1, 101.0, &message)]);

        assert_eq!(trace.spans[2].name, "tool: search");
        assert_eq!(trace.events[0].summary, "tool_call search");
    }
}
