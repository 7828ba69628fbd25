//! A thread's state on the wire.

use threadgate_shared::domain::{ExecutionMeta, Json, ThreadState};

/// The state as clients see it; in production without the text of a failure.
#[must_use]
pub fn of(state: &ThreadState, production: bool) -> Json {
    without_error(state.to_wire(), production)
}

/// The same state at another place.
#[must_use]
pub fn with_meta(state: &ThreadState, meta: &ExecutionMeta, production: bool) -> Json {
    let mut wire = state.to_wire();
    wire["execution_meta"] = serde_json::to_value(meta).expect("our own types have string keys and finite numbers");
    without_error(wire, production)
}

fn without_error(mut wire: Json, production: bool) -> Json {
    if production && let Some(Json::Object(data)) = wire.pointer_mut("/execution_meta/internal_data") {
        data.remove("error");
    }
    wire
}
