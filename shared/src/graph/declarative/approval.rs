//! `approval`: a node that stops where a person must decide, and goes on by the decision.

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Deserialize;

use super::document::Span;
use super::template::Template;
use super::tools::OnExpiry;
use crate::domain::{Json, JsonMap};
use crate::graph::expression::{ExpressionError, Facts, NodeFacts};
use crate::graph::{Command, END, Interrupt, Node, NodeContext, NodeError, Outcome, Patch};

/// The word for this kind of question.
pub const APPROVAL: &str = "approval";

/// An `approval` node. The answer is `{"approved": true or false, "reason"?}`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ApprovalSpec {
    /// The question: text with CEL between `{{` and `}}`.
    pub message: String,
    /// What it is about, for the one who answers.
    #[serde(default)]
    pub value: Json,
    /// How long it may be answered. Default: for ever.
    #[serde(default)]
    pub expires_in: Option<Span>,
    /// What counts when that time is over. Default: nothing, the question stays, listed as expired.
    #[serde(default)]
    pub on_expiry: Option<OnExpiry>,
    /// Where a yes leads. Default: the edges are followed.
    #[serde(default)]
    pub approved: Option<String>,
    /// Where a no leads. Default `__end__`.
    #[serde(default)]
    pub denied: Option<String>,
    /// The field that keeps the answer. Default: none.
    #[serde(default)]
    pub field: Option<String>,
}

/// An `approval` node, compiled.
#[derive(Debug)]
pub(super) struct ApprovalNode {
    message: Template,
    spec: ApprovalSpec,
}

impl ApprovalNode {
    /// Compiles the node.
    ///
    /// # Errors
    /// What is wrong with the message, with its place inside the spec.
    pub(super) fn new(spec: ApprovalSpec) -> Result<Self, (String, ExpressionError)> {
        let message = Template::compile(&spec.message, None).map_err(|error| ("/message".to_owned(), error))?;
        Ok(Self { message, spec })
    }

    fn question(&self, message: String) -> Interrupt {
        let is_yes = |end: OnExpiry| end == OnExpiry::Approved;
        Interrupt {
            value: self.spec.value.clone(),
            message: Some(message),
            reason: APPROVAL.to_owned(),
            response_schema: Some(serde_json::json!({
                "type": "object",
                "required": ["approved"],
                "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}},
            })),
            metadata: JsonMap::new(),
            expires_in: self.spec.expires_in.map(|span| span.0),
            on_expiry: self.spec.on_expiry.map(|end| serde_json::json!({"approved": is_yes(end)})),
        }
    }
}

#[async_trait]
impl Node for ApprovalNode {
    async fn run(&self, ctx: NodeContext) -> Result<Outcome, NodeError> {
        let facts = NodeFacts { config: &ctx.config, attempt: ctx.attempt, visit: 1, answer: None };
        let message = self.message.render(&Facts { state: &ctx.state, node: Some(&facts) });
        let answer = ctx.interrupt(self.question(message.map_err(NodeError::permanent)?))?;
        // Only the boolean itself is a yes.
        let goto = match answer["approved"] == true {
            true => self.spec.approved.clone(),
            false => Some(self.spec.denied.clone().unwrap_or_else(|| END.to_owned())),
        };
        let fields = self.spec.field.iter().map(|field| (field.clone(), answer.clone())).collect();
        let update = Patch { fields, ..Patch::default() };
        Ok(Outcome { command: Command { update, goto }, questions: Vec::new() })
    }
}
