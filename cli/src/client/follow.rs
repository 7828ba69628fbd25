//! Follows a run's events and shows them as they come; comes back where it ended when the
//! connection breaks.

use std::time::Duration;

use futures::StreamExt;
use reqwest::Method;
use serde_json::Value;

use super::{Server, pretty, shown};
use crate::exit::{Exit, Failure};
use crate::print::{self, Paint};

/// How often a broken connection is opened anew before the follower gives up.
const RECONNECTS_MAX: u32 = 10;

/// One event as it is on the wire.
#[derive(Debug, Clone, PartialEq, Default)]
struct Event {
    id: Option<String>,
    name: String,
    data: String,
}

/// Shows the events of `run` until its end.
///
/// # Errors
/// If the server refuses, or cannot be reached again.
pub(super) async fn follow(server: &Server, run: &str, json: bool) -> Result<(), Failure> {
    let mut screen = Screen { json, paint: Paint::for_stdout(), growing: None, grown: Vec::new() };
    let mut last_id: Option<String> = None;
    let mut broken = 0;
    loop {
        let mut request = server.request(Method::GET, &["v1", "runs", run, "events"], &[]);
        if let Some(id) = &last_id {
            request = request.header("last-event-id", id);
        }
        match server.send(request).await {
            Ok(response) => {
                let before = last_id.clone();
                if read(response, &mut screen, &mut last_id).await {
                    return Ok(());
                }
                broken = if last_id == before { broken + 1 } else { 0 };
            }
            Err(failure) if failure.exit == Exit::Unreachable && broken < RECONNECTS_MAX => broken += 1,
            Err(failure) => return Err(failure),
        }
        if broken >= RECONNECTS_MAX {
            let message = "the event stream keeps breaking; the run goes on, see `threadgate runs get`";
            return Err(Failure::new(Exit::Unreachable, message));
        }
        tokio::time::sleep(Duration::from_millis(200) * broken.max(1)).await;
    }
}

/// Shows what one response brings; whether the run's last event was in it.
async fn read(response: reqwest::Response, screen: &mut Screen, last_id: &mut Option<String>) -> bool {
    let mut bytes = response.bytes_stream();
    let mut parser = Parser::default();
    while let Some(Ok(piece)) = bytes.next().await {
        for event in parser.add(&piece) {
            screen.show(&event);
            if event.id.is_some() {
                last_id.clone_from(&event.id);
            }
            if event.name == "run_ended" {
                return true;
            }
        }
    }
    false
}

/// Where events are shown: as JSON, or as a conversation in which messages grow.
struct Screen {
    json: bool,
    paint: Paint,
    /// The message whose pieces are on the line that has not ended yet.
    growing: Option<Value>,
    /// Messages that were shown in pieces.
    grown: Vec<Value>,
}

impl Screen {
    fn show(&mut self, event: &Event) {
        let data: Value = serde_json::from_str(&event.data).unwrap_or_default();
        if self.json {
            let id = event.id.clone().map_or(Value::Null, Value::String);
            print::line(serde_json::json!({"id": id, "event": event.name, "data": data}));
            return;
        }
        if event.name == "delta" {
            self.grow(&data["message"]);
            return;
        }
        self.end_line();
        let node = shown(&data["node"]);
        match event.name.as_str() {
            "node_started" if data["attempt"] != 1 => {
                print::line(self.paint.dim(format!("> {node} (attempt {})", data["attempt"])));
            }
            "node_started" => print::line(self.paint.dim(format!("> {node}"))),
            "custom" => print::line(format!("  {}", pretty(&data["value"]).replace('\n', "\n  "))),
            "node_finished" => {
                let messages = data["messages"].as_array().into_iter().flatten();
                for message in messages.filter(|message| !self.grown.contains(&message["message_id"])) {
                    print::line(said(message, self.paint));
                }
            }
            "gap" => print::line(self.paint.dim("… events are missing here; what follows is from the store")),
            _ => {}
        }
    }

    fn grow(&mut self, message: &Value) {
        if self.growing.as_ref() != Some(&message["message_id"]) {
            self.end_line();
            self.growing = Some(message["message_id"].clone());
            print::piece(self.paint.bold(format!("{}: ", shown(&message["role"]))));
        }
        print::piece(text_of(message));
    }

    fn end_line(&mut self) {
        if let Some(id) = self.growing.take() {
            self.grown.push(id);
            print::line("");
        }
    }
}

/// A message as a line: who, and what they said.
pub(super) fn said(message: &Value, paint: Paint) -> String {
    format!("{} {}", paint.bold(format!("{}:", shown(&message["role"]))), text_of(message))
}

fn text_of(message: &Value) -> String {
    let blocks = message["content"].as_array().into_iter().flatten();
    let text = |block: &Value| match block["type"].as_str() {
        Some("text") => shown(&block["text"]),
        Some("tool_result") => shown(&block["output"]),
        Some("error") => String::new(), // The failed result beside it says the same.
        _ => block.to_string(),
    };
    blocks.map(text).collect()
}

/// Cuts server-sent events out of a stream of bytes.
#[derive(Debug, Default)]
struct Parser {
    rest: Vec<u8>,
    event: Event,
}

impl Parser {
    fn add(&mut self, piece: &[u8]) -> Vec<Event> {
        self.rest.extend_from_slice(piece);
        let mut events = Vec::new();
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end_matches(['\n', '\r']);
            if line.is_empty() {
                let event = std::mem::take(&mut self.event);
                events.extend((!event.data.is_empty()).then_some(event));
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "id" => self.event.id = Some(value.to_owned()),
                "event" => value.clone_into(&mut self.event.name),
                "data" if self.event.data.is_empty() => value.clone_into(&mut self.event.data),
                "data" => self.event.data = format!("{}\n{value}", self.event.data),
                _ => {} // A comment, or a field nobody needs.
            }
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_whole_wherever_the_stream_is_cut() {
        let stream = ": hello\n\nid: 256-0\nevent: node_started\ndata: {\"node\":\"plän\"}\n\ndata: a\ndata: b\n\n";
        let expected = [
            Event { id: Some("256-0".into()), name: "node_started".into(), data: "{\"node\":\"plän\"}".into() },
            Event { id: None, name: String::new(), data: "a\nb".into() },
        ];

        for cut in 0..stream.len() {
            let mut parser = Parser::default();
            let (first, second) = stream.as_bytes().split_at(cut);
            let events: Vec<Event> = [parser.add(first), parser.add(second)].concat();
            assert_eq!(events, expected, "cut at {cut}");
        }
    }
}
