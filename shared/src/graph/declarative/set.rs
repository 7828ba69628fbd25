//! `set`: a node that computes fields, a message and a jump with CEL, and does nothing else.

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Deserialize;

use super::document::Ordered;
use super::template::Template;
use crate::domain::{Json, JsonMap, Message, Role};
use crate::graph::expression::{Expression, ExpressionError, Facts, NodeFacts, Place};
use crate::graph::{Command, IdKind, Node, NodeContext, NodeError, Outcome, Patch};

/// A `set` node.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetSpec {
    /// Field → new value: text is a CEL expression, anything else is the value itself. All see the
    /// state from before the node: `state` (its fields), `messages`, `last`, `user_text`, `meta`,
    /// `thread_id`, `config` (of the run) and `attempt`.
    #[serde(default)]
    pub values: Ordered<Json>,
    /// What the assistant says: text with CEL between `{{` and `}}`.
    #[serde(default)]
    pub say: Option<String>,
    /// A CEL expression that names the next node; null follows the edges.
    #[serde(default)]
    pub goto: Option<String>,
}

/// A `set` node, compiled.
#[derive(Debug)]
pub struct SetNode {
    values: Vec<(String, Value)>,
    say: Option<Template>,
    goto: Option<Expression>,
    ids: IdKind,
}

#[derive(Debug)]
enum Value {
    Fixed(Json),
    Computed(Expression),
}

impl SetNode {
    /// Compiles the node.
    ///
    /// # Errors
    /// The first expression that is none, with its place inside the spec.
    pub fn new(spec: &SetSpec, ids: IdKind) -> Result<Self, (String, ExpressionError)> {
        let value = |(field, value): &(String, Json)| match value {
            Json::String(text) => match Expression::compile(text, Place::Node, None) {
                Ok(expression) => Ok((field.clone(), Value::Computed(expression))),
                Err(error) => Err((format!("/values/{field}"), error)),
            },
            value => Ok((field.clone(), Value::Fixed(value.clone()))),
        };
        let values = spec.values.0.iter().map(value).collect::<Result<_, _>>()?;
        let say = spec.say.as_deref().map(|text| Template::compile(text, None)).transpose();
        let goto = spec.goto.as_deref().map(|text| Expression::compile(text, Place::Node, None)).transpose();
        Ok(Self {
            values,
            say: say.map_err(|error| ("/say".to_owned(), error))?,
            goto: goto.map_err(|error| ("/goto".to_owned(), error))?,
            ids,
        })
    }

    fn outcome(&self, facts: &Facts<'_>) -> Result<Outcome, String> {
        let mut fields = JsonMap::new();
        for (field, value) in &self.values {
            let value = match value {
                Value::Fixed(value) => value.clone(),
                Value::Computed(expression) => {
                    expression.evaluate(facts).map_err(|error| format!("the value of '{field}': {error}"))?
                }
            };
            fields.insert(field.clone(), value);
        }
        let mut messages = Vec::new();
        if let Some(say) = &self.say {
            messages.push(message(say.render(facts).map_err(|error| format!("'say': {error}"))?, self.ids));
        }
        let goto = match self.goto.as_ref().map(|goto| goto.evaluate(facts)).transpose() {
            Ok(None | Some(Json::Null)) => None,
            Ok(Some(Json::String(target))) => Some(target),
            Ok(Some(other)) => return Err(format!("'goto' is {other}, not the name of a node")),
            Err(error) => return Err(format!("'goto': {error}")),
        };
        let command = Command { update: Patch { messages, remove: Vec::new(), fields }, goto };
        Ok(Outcome { command, ..Outcome::default() })
    }
}

#[async_trait]
impl Node for SetNode {
    async fn run(&self, ctx: NodeContext) -> Result<Outcome, NodeError> {
        let node = NodeFacts { config: &ctx.config, attempt: ctx.attempt, visit: 1, answer: ctx.answers.last() };
        let facts = Facts { state: &ctx.state, node: Some(&node) };
        self.outcome(&facts).map_err(NodeError::permanent)
    }
}

/// What the assistant says, under an id of the graph's kind.
pub(super) fn message(text: String, ids: IdKind) -> Message {
    let mut message = Message::text(Role::Assistant, text);
    message.message_id = ids.message_id();
    message
}
