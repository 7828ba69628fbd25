//! The body of `POST /v1/runs`.

use std::time::Duration;

use threadgate_shared::domain::client::{self, InputLocs};
use threadgate_shared::domain::parse::Fill;
use threadgate_shared::domain::{Json, JsonMap, Limits, ThreadId};
use threadgate_shared::graph::IdKind;
use threadgate_shared::graph::admission::RunInput;
use threadgate_shared::graph::ids::unix_seconds;
use utoipa::ToSchema;

use super::run_request::{RunConfig, RunRequest, recursion_limit};
use crate::error::ApiError;
use crate::extract::{Fields, FromFields};

/// Keys that this server does not serve; a silent run that differs from what was asked for would be
/// worse than a refusal.
const NOT_SERVED: [&str; 3] = ["run_at", "delay", "webhook"];

/// A run to create.
#[derive(Debug, ToSchema)]
#[schema(as = NewRun)]
pub struct NewRunBody {
    /// The graph, in its newest version.
    pub graph: String,
    /// The thread; missing, null or blank = a new one.
    #[schema(value_type = Option<String>)]
    thread_id: Option<ThreadId>,
    /// `{"messages"?: [...], "state"?: {...}}`, by the same rules as invoke.
    #[schema(value_type = Object)]
    pub input: Json,
    /// As in invoke.
    #[schema(value_type = Option<Object>)]
    config: JsonMap,
    /// Steps at most, 1 to 100. Default 25.
    #[schema(minimum = 1, maximum = 100, default = 25)]
    recursion_limit: i32,
    /// `interactive` (0) or `batch` (1).
    #[schema(rename = "priority", value_type = Option<String>, default = "interactive")]
    pub class: i16,
    /// The whole body as text: what an idempotency key stands for.
    #[schema(ignore)]
    pub text: String,
}

impl FromFields for NewRunBody {
    const KNOWN: &'static [&'static str] =
        &["graph", "thread_id", "input", "config", "recursion_limit", "priority", "multitask"];

    fn from_fields(mut fields: Fields, limits: &Limits) -> Result<Self, ApiError> {
        let text = fields.to_text();
        for key in NOT_SERVED {
            if fields.get(key).is_some_and(|value| !value.is_null()) {
                let msg = format!("Value error, '{key}' is not served; leave it out and create the run when it is due");
                return Err(ApiError::field(vec!["body".into(), key.into()], "value_error", msg));
            }
        }
        fields.word("multitask", &["reject"])?;
        let Some(graph) = fields.text("graph")? else {
            return Err(ApiError::field(vec!["body".into(), "graph".into()], "missing", "Field required"));
        };
        let config = fields.object("config")?;
        Ok(Self {
            graph,
            thread_id: thread_id(&fields, &config, limits)?,
            input: Json::Object(fields.object("input")?),
            config,
            recursion_limit: recursion_limit(&mut fields, limits)?,
            class: match fields.word("priority", &["interactive", "batch"])? {
                "batch" => 1,
                _ => 0,
            },
            text,
        })
    }
}

impl NewRunBody {
    /// The run it asks for, of a graph with this kind of ids.
    ///
    /// # Errors
    /// 422, field by field.
    pub fn into_request(self, ids: IdKind, limits: &Limits, cap: Duration) -> Result<RunRequest, ApiError> {
        let mut config = RunConfig::read(self.config, self.recursion_limit, limits, cap)?;
        config.thread_id = self.thread_id;
        let loc = |key: &str| ["body".into(), "input".into(), key.into()];
        let locs = InputLocs { messages: &loc("messages"), state: &loc("state") };
        let fill = Fill { new_id: &|| ids.message_id(), now: unix_seconds() };
        let input =
            client::run_input(self.input.get("messages"), self.input.get("state"), false, &locs, limits, &fill)?;
        let input = RunInput { messages: input.messages, state: input.state, ..RunInput::default() };
        Ok(RunRequest { input, config, step_limit: self.recursion_limit })
    }
}

/// The thread that the body names, beside or inside `config`.
fn thread_id(fields: &Fields, config: &JsonMap, limits: &Limits) -> Result<Option<ThreadId>, ApiError> {
    let beside = limits.thread_id(fields.get("thread_id"), &["body".into(), "thread_id".into()])?;
    let loc = ["body".into(), "config".into(), "thread_id".into()];
    let inside = limits.thread_id(config.get("thread_id"), &loc)?;
    match (beside, inside) {
        (Some(beside), Some(inside)) if beside != inside => {
            let msg = "Value error, thread_id and config.thread_id must match";
            Err(ApiError::field(loc.to_vec(), "value_error", msg))
        }
        (beside, inside) => Ok(beside.or(inside)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(value: Json) -> Result<NewRunBody, ApiError> {
        NewRunBody::from_fields(Fields::new(value.as_object().cloned().unwrap_or_default()), &Limits::default())
    }

    #[test]
    fn what_is_not_served_is_refused_and_not_ignored() {
        for refused in [
            json!({"graph": "g", "multitask": "enqueue"}),
            json!({"graph": "g", "run_at": "2030-01-01T00:00:00Z"}),
            json!({"graph": "g", "delay": 5}),
            json!({"graph": "g", "webhook": {"url": "http://x"}}),
            json!({"graph": "g", "priority": "urgent"}),
            json!({}),
        ] {
            assert_eq!(body(refused).unwrap_err().code, "VALIDATION_ERROR");
        }
        assert!(body(json!({"graph": "g", "multitask": "reject", "webhook": null})).is_ok());
    }

    #[test]
    fn the_thread_may_stand_in_either_place() {
        let thread = |value: Json| body(value).map(|body| body.thread_id.map(|id| id.0));

        assert_eq!(thread(json!({"graph": "g", "thread_id": 12})).unwrap().as_deref(), Some("12"));
        assert_eq!(thread(json!({"graph": "g", "config": {"thread_id": "a"}})).unwrap().as_deref(), Some("a"));
        assert_eq!(thread(json!({"graph": "g", "thread_id": " "})).unwrap(), None);
        assert!(thread(json!({"graph": "g", "thread_id": "a", "config": {"thread_id": "b"}})).is_err());
    }
}
