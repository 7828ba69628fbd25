//! The rules, pure: no I/O, never async, no clock.

pub mod blocks;
pub mod client;
pub mod fix;
pub mod id;
pub mod interrupt;
pub mod limits;
pub mod message;
pub mod meta;
pub mod observe;
pub mod parse;
pub mod results;
pub mod run;
mod shape;
mod size;
pub mod state;
pub mod tool;

pub use id::{
    Caller, GraphVersion, LeaseToken, MessageId, PoolName, RunId, Scope, StepId, Tenant, ThreadId, ThreadKey, UserId,
    WorkerId,
};
pub use interrupt::{CallRef, GateAnswer, InterruptRecord, InterruptStatus, Question, QuestionKind};
pub use limits::Limits;
pub use message::{FieldError, Message, Role};
pub use meta::{ExecutionMeta, ExecutionStatus};
pub use run::{IllegalTransition, RunEvent, RunStatus};
pub use size::json_bytes;
pub use state::ThreadState;
pub use tool::{CallResult, CallStatus, Effect, Guard, ToolSpec, ToolsSpec};

/// Any JSON value; numbers keep their digits and objects their order.
pub type Json = serde_json::Value;

/// A JSON object.
pub type JsonMap = serde_json::Map<String, Json>;
