//! What a client asks to be run: the body of invoke and stream, and the configuration that every
//! face shares.

use std::time::Duration;

use serde::Deserialize;
use threadgate_shared::domain::client::{self, InputLocs};
use threadgate_shared::domain::parse::Fill;
use threadgate_shared::domain::{FieldError, Json, JsonMap, Limits, ThreadId};
use threadgate_shared::graph::IdKind;
use threadgate_shared::graph::admission::RunInput;
use threadgate_shared::graph::ids::unix_seconds;
use utoipa::ToSchema;

use super::schema::MessageSchema;
use crate::error::ApiError;
use crate::extract::{Fields, FromFields};

/// Steps a run may take where nobody says.
pub const STEP_LIMIT: i32 = 25;

/// Keys that a client cannot set: dropped in silence.
const RESERVED: [&str; 4] = ["user", "user_id", "authz", "remote_tools"];

/// How much an answer shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Granularity {
    /// Messages only.
    #[default]
    Low,
    /// And the context with its summary; on a stream the states.
    Partial,
    /// Everything.
    Full,
}

/// A run as every face asks for it, not yet checked against a graph's kind of ids.
#[derive(Debug)]
pub struct RunRequest {
    /// See [`RunInput`].
    pub input: RunInput,
    /// The configuration.
    pub config: RunConfig,
    /// Steps it may take, `__start__` included.
    pub step_limit: i32,
}

/// The body of invoke and stream.
#[derive(Debug, ToSchema)]
#[schema(as = GraphRun)]
pub struct GraphRunBody {
    /// New messages: `user`, or `tool` with awaited results. At least one, unless `resume` is there.
    #[schema(value_type = Option<Vec<MessageSchema>>)]
    messages: Option<Json>,
    /// The answer to the pending question; null is an answer too.
    #[schema(value_type = Option<Object>)]
    resume: Option<Json>,
    /// Which question `resume` answers.
    interrupt_id: Option<String>,
    /// Values for state fields; `current_node` picks the start node.
    #[schema(value_type = Option<Object>)]
    initial_state: Option<Json>,
    /// `thread_id`, `run_id`, `node_timeout`, `thread_name`, `thread_meta`, `on_disconnect`; other
    /// keys reach the nodes.
    #[schema(value_type = Option<Object>)]
    config: JsonMap,
    /// Steps at most, 1 to 100. Default 25.
    #[schema(minimum = 1, maximum = 100, default = 25)]
    recursion_limit: i32,
    /// How much the answer shows.
    #[schema(default = "low")]
    pub response_granularity: Granularity,
}

impl FromFields for GraphRunBody {
    const KNOWN: &'static [&'static str] =
        &["messages", "resume", "interrupt_id", "initial_state", "config", "recursion_limit", "response_granularity"];

    fn from_fields(mut fields: Fields, limits: &Limits) -> Result<Self, ApiError> {
        Ok(Self {
            messages: fields.take("messages"),
            resume: fields.take("resume"),
            interrupt_id: fields.text("interrupt_id")?,
            initial_state: fields.take("initial_state"),
            config: fields.object("config")?,
            recursion_limit: recursion_limit(&mut fields, limits)?,
            response_granularity: match fields.word("response_granularity", &["low", "partial", "full"])? {
                "full" => Granularity::Full,
                "partial" => Granularity::Partial,
                _ => Granularity::Low,
            },
        })
    }
}

impl GraphRunBody {
    /// The run it asks for, of a graph with this kind of ids.
    ///
    /// # Errors
    /// 422, field by field.
    pub fn into_request(self, ids: IdKind, limits: &Limits, cap: Duration) -> Result<RunRequest, ApiError> {
        let config = RunConfig::read(self.config, self.recursion_limit, limits, cap)?;
        let locs = InputLocs {
            messages: &["body".into(), "messages".into()],
            state: &["body".into(), "initial_state".into()],
        };
        let fill = Fill { new_id: &|| ids.message_id(), now: unix_seconds() };
        let is_resume = self.resume.is_some();
        let input =
            client::run_input(self.messages.as_ref(), self.initial_state.as_ref(), is_resume, &locs, limits, &fill)?;
        // Without an answer there is no question it could be meant for.
        let interrupt_id = self.interrupt_id.filter(|_| is_resume);
        let (messages, state) = (input.messages, input.state);
        let input = RunInput { messages, state, resume: self.resume, interrupt_id, ..RunInput::default() };
        Ok(RunRequest { input, config, step_limit: self.recursion_limit })
    }
}

/// The field `recursion_limit`, the same on every face.
///
/// # Errors
/// 422 outside of 1 to the server's limit.
pub fn recursion_limit(fields: &mut Fields, limits: &Limits) -> Result<i32, FieldError> {
    let limit = fields.int("recursion_limit", 1..=i64::from(limits.step_limit_max))?;
    Ok(limit.and_then(|limit| i32::try_from(limit).ok()).unwrap_or(STEP_LIMIT))
}

/// What the engine reads of a run's configuration, and the rest for the nodes.
#[derive(Debug, Default)]
pub struct RunConfig {
    /// The thread; `None` = a new one.
    pub thread_id: Option<ThreadId>,
    /// The client's own name for the run.
    pub client_run_id: Option<String>,
    /// The deadline of a node without one of its own; `None` = the server's cap.
    pub node_timeout: Option<Duration>,
    /// The name of a new thread.
    pub thread_name: Option<String>,
    /// Free data of a new thread.
    pub thread_meta: Option<Json>,
    /// Whether the run is stopped when its client goes away.
    pub stops_on_disconnect: bool,
    /// What nodes see.
    pub for_nodes: JsonMap,
}

impl RunConfig {
    /// Reads `config`; no node deadline it asks for is longer than `cap`.
    ///
    /// # Errors
    /// 422, with the key.
    pub fn read(mut config: JsonMap, step_limit: i32, limits: &Limits, cap: Duration) -> Result<Self, ApiError> {
        config.retain(|key, _| !RESERVED.contains(&key.as_str()) && !key.starts_with('_'));
        let thread_id = limits.thread_id(config.get("thread_id"), &loc("thread_id"))?;
        let read = Self {
            thread_id,
            client_run_id: client_run_id(config.get("run_id"), limits)?,
            node_timeout: node_timeout(config.get("node_timeout"), cap)?,
            thread_name: match config.get("thread_name") {
                None | Some(Json::Null) => None,
                Some(Json::String(name)) => Some(name.clone()),
                Some(_) => return Err(wrong("thread_name", "string_type", "Input should be a valid string").into()),
            },
            thread_meta: config.get("thread_meta").filter(|meta| !meta.is_null()).cloned(),
            stops_on_disconnect: match config.get("on_disconnect").map(|word| word.as_str()) {
                None | Some(Some("continue")) => false,
                Some(Some("stop")) => true,
                Some(_) => {
                    let msg = "Input should be 'continue' or 'stop'";
                    return Err(wrong("on_disconnect", "literal_error", msg).into());
                }
            },
            for_nodes: JsonMap::new(),
        };
        config.insert("recursion_limit".to_owned(), step_limit.into());
        Ok(Self { for_nodes: config, ..read })
    }
}

/// The client's name for its run: text or a number; anything blank is no name.
fn client_run_id(value: Option<&Json>, limits: &Limits) -> Result<Option<String>, FieldError> {
    let text = match value {
        None | Some(Json::Null) => return Ok(None),
        Some(Json::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Json::String(text)) => text.clone(),
        Some(Json::Number(number)) => number.to_string(),
        Some(_) => return Err(wrong("run_id", "string_type", "Input should be a valid string")),
    };
    limits.check_id(&text, &loc("run_id"))?;
    Ok(Some(text))
}

/// Seconds; null, 0 and less take the run's own deadline away, so that the server's cap is left.
fn node_timeout(value: Option<&Json>, cap: Duration) -> Result<Option<Duration>, FieldError> {
    let text = match value {
        None | Some(Json::Null) => return Ok(None),
        Some(Json::Number(number)) => number.to_string(),
        Some(Json::String(text)) => text.trim().to_owned(),
        Some(_) => return Err(wrong("node_timeout", "float_type", "Input should be a valid number")),
    };
    let seconds: f64 = text.parse().unwrap_or(f64::NAN);
    if seconds.is_nan() {
        let msg = "Input should be a valid number, unable to parse string as a number";
        return Err(wrong("node_timeout", "float_parsing", msg));
    }
    if seconds <= 0.0 {
        return Ok(None);
    }
    Ok(Some(Duration::try_from_secs_f64(seconds).unwrap_or(cap).min(cap)))
}

fn loc(key: &str) -> Vec<Json> {
    vec!["body".into(), "config".into(), key.into()]
}

fn wrong(key: &str, kind: &'static str, msg: &str) -> FieldError {
    FieldError { loc: loc(key), msg: msg.to_owned(), kind }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const CAP: Duration = Duration::from_secs(900);

    fn config(value: Json) -> Result<RunConfig, ApiError> {
        RunConfig::read(value.as_object().cloned().unwrap_or_default(), 25, &Limits::default(), CAP)
    }

    fn body(value: Json) -> Result<RunRequest, ApiError> {
        let fields = Fields::new(value.as_object().cloned().unwrap_or_default());
        GraphRunBody::from_fields(fields, &Limits::default())?.into_request(IdKind::String, &Limits::default(), CAP)
    }

    fn hello() -> Json {
        json!([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    }

    /// C84: `node_timeout` 0, −1 and null act as the server's cap; more than the cap is the cap.
    #[test]
    fn a_client_cannot_take_the_deadline_away() {
        for none in [json!({}), json!({"node_timeout": 0}), json!({"node_timeout": -1}), json!({"node_timeout": null})]
        {
            assert_eq!(config(none).unwrap().node_timeout, None);
        }
        let timeout = |value: Json| config(json!({"node_timeout": value})).unwrap().node_timeout;
        assert_eq!(timeout(json!("1.5")), Some(Duration::from_millis(1500)));
        assert_eq!(timeout(json!(1e300)), Some(CAP));
        for refused in [json!(true), json!([]), json!("soon")] {
            assert!(config(json!({"node_timeout": refused})).is_err());
        }
    }

    #[test]
    fn reserved_keys_are_dropped_in_silence() {
        let read =
            config(json!({"user_id": "evil", "authz": {}, "_node": 1, "remote_tools": [], "hint": "H"})).unwrap();

        assert_eq!(Json::Object(read.for_nodes), json!({"hint": "H", "recursion_limit": 25}));
    }

    #[test]
    fn the_limit_of_the_body_replaces_the_one_in_config() {
        let request =
            body(json!({"messages": hello(), "config": {"recursion_limit": 2}, "recursion_limit": "4"})).unwrap();

        assert_eq!((request.step_limit, &request.config.for_nodes["recursion_limit"]), (4, &json!(4)));
    }

    /// C84: the step limit at its edges.
    #[test]
    fn the_step_limit_is_bounded() {
        for refused in [json!(0), json!(101), json!("x"), json!(null), serde_json::from_str("1e30").unwrap()] {
            let error = body(json!({"messages": hello(), "recursion_limit": refused})).unwrap_err();
            assert_eq!(error.details[0].loc, [json!("body"), json!("recursion_limit")]);
        }
    }

    #[test]
    fn a_question_is_named_only_together_with_an_answer() {
        let plain = body(json!({"messages": hello(), "interrupt_id": "int_0"})).unwrap();
        let answer = body(json!({"resume": null, "interrupt_id": "int_0"})).unwrap();

        assert_eq!(plain.input.interrupt_id, None);
        assert_eq!((answer.input.resume, answer.input.interrupt_id.as_deref()), (Some(Json::Null), Some("int_0")));
    }

    #[test]
    fn words_are_case_exact() {
        let error = body(json!({"messages": hello(), "response_granularity": "LOW"})).unwrap_err();
        assert_eq!(error.details[0].kind, "enum");
        assert!(config(json!({"on_disconnect": "Stop"})).is_err());
        assert!(config(json!({"on_disconnect": "stop"})).unwrap().stops_on_disconnect);
    }

    #[test]
    fn an_empty_body_lacks_a_message() {
        let error = body(json!({})).unwrap_err();

        assert_eq!(
            (error.details[0].kind, error.details[0].loc.as_slice()),
            ("value_error", [json!("body")].as_slice())
        );
    }
}
