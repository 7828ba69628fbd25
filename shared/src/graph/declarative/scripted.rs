//! `scripted`: a node that gives canned replies, for demos and tests.

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Deserialize;

use super::document::{Span, any_schema};
use super::set::message;
use super::template::Template;
use crate::domain::{Json, JsonMap, Message};
use crate::graph::expression::{Expression, ExpressionError, Facts, NodeFacts, Place};
use crate::graph::reply::message_of;
use crate::graph::{Command, IdKind, Interrupt, Node, NodeContext, NodeError, Outcome, Patch};

/// The metadata key of the messages that scripted nodes write; a node's visits are counted by it.
const MARK: &str = "scripted";

/// A `scripted` node.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScriptedSpec {
    /// The replies; the first whose `when` holds is given. If none does, the node does nothing.
    #[schemars(length(min = 1))]
    pub replies: Vec<ReplySpec>,
}

/// One canned reply. In order: `sleep`, `emit`, `interrupt`, `error`, then all the rest together.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplySpec {
    /// A CEL expression; the reply is given only if it is true. Beside the state it sees `user_text`
    /// (what the user said last), `attempt` (2 after one failure) and `visit` (2 after this node
    /// has spoken once since the user last did).
    #[serde(default)]
    pub when: Option<String>,
    /// How long the node works before it replies, such as `200ms`.
    #[serde(default)]
    pub sleep: Option<Span>,
    /// A custom event to send to whoever follows the run.
    #[serde(default)]
    pub emit: Json,
    /// A question to ask; its answer is `answer` in `say`.
    #[serde(default)]
    #[schemars(with = "QuestionSpec")]
    pub interrupt: Option<QuestionSpec>,
    /// Fail instead of replying.
    #[serde(default)]
    #[schemars(with = "FailureSpec")]
    pub error: Option<FailureSpec>,
    /// What the assistant says: text with CEL between `{{` and `}}`.
    #[serde(default)]
    pub say: Option<String>,
    /// Send `say` word by word, as a model would.
    #[serde(default)]
    pub stream: bool,
    /// Messages to add: text, or messages as they are on the wire.
    #[serde(default)]
    pub messages: Vec<Json>,
    /// Field → new value, as it stands here.
    #[serde(default)]
    pub fields: JsonMap,
    /// The next node, or `__end__`; otherwise the edges are followed.
    #[serde(default)]
    pub goto: Option<String>,
}

/// A question of a scripted node.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuestionSpec {
    /// What it is about.
    #[serde(default)]
    pub value: Json,
    /// The question in words.
    #[serde(default)]
    pub message: Option<String>,
    /// A word for the kind of question. Default `input_required`.
    #[serde(default)]
    pub reason: Option<String>,
    /// JSON Schema of the answer.
    #[serde(default)]
    #[schemars(schema_with = "any_schema")]
    pub response_schema: Json,
}

/// A failure of a scripted node.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FailureSpec {
    /// What went wrong.
    pub message: String,
    /// Default `NODE_001`.
    #[serde(default)]
    pub code: Option<String>,
    /// Whether another attempt could succeed.
    #[serde(default)]
    pub retryable: bool,
}

/// A `scripted` node, compiled.
#[derive(Debug)]
pub struct ScriptedNode {
    replies: Vec<Canned>,
    ids: IdKind,
}

#[derive(Debug)]
struct Canned {
    when: Option<Expression>,
    say: Option<Template>,
    spec: ReplySpec,
}

impl ScriptedNode {
    /// Compiles the node.
    ///
    /// # Errors
    /// The first expression that is none, with its place inside the spec.
    pub fn new(spec: ScriptedSpec, ids: IdKind) -> Result<Self, (String, ExpressionError)> {
        let canned = |(index, spec): (usize, ReplySpec)| {
            let at = |name: &'static str| move |error| (format!("/replies/{index}/{name}"), error);
            let when = spec.when.as_deref().map(|text| Expression::compile(text, Place::Node, None)).transpose();
            let say = spec.say.as_deref().map(|text| Template::compile(text, None)).transpose();
            Ok(Canned { when: when.map_err(at("when"))?, say: say.map_err(at("say"))?, spec })
        };
        let replies = spec.replies.into_iter().enumerate().map(canned).collect::<Result<_, _>>()?;
        Ok(Self { replies, ids })
    }

    fn chosen(&self, facts: &Facts<'_>) -> Result<Option<&Canned>, String> {
        for reply in &self.replies {
            let holds = match &reply.when {
                None => true,
                Some(when) => match when.evaluate(facts)? {
                    Json::Bool(holds) => holds,
                    other => return Err(format!("'when' is {other}, neither true nor false")),
                },
            };
            if holds {
                return Ok(Some(reply));
            }
        }
        Ok(None)
    }
}

#[async_trait]
impl Node for ScriptedNode {
    async fn run(&self, ctx: NodeContext) -> Result<Outcome, NodeError> {
        let (visit, config) = (visit(&ctx), ctx.config.clone());
        let before = NodeFacts { config: &config, attempt: ctx.attempt, visit, answer: None };
        let chosen = self.chosen(&Facts { state: &ctx.state, node: Some(&before) });
        let Some(reply) = chosen.map_err(NodeError::permanent)? else {
            return Ok(Outcome::default());
        };
        let spec = &reply.spec;
        if let Some(Span(time)) = spec.sleep {
            work(&ctx, time).await?;
        }
        if !spec.emit.is_null() {
            ctx.emit(spec.emit.clone());
        }
        let answer = spec.interrupt.clone().map(|question| ctx.interrupt(question.into())).transpose()?;
        if let Some(failure) = &spec.error {
            let code = failure.code.clone().unwrap_or_else(|| "NODE_001".to_owned());
            return Err(NodeError::Failed { code, message: failure.message.clone(), retryable: failure.retryable });
        }
        let facts = NodeFacts { answer: answer.as_ref(), ..before };
        let facts = Facts { state: &ctx.state, node: Some(&facts) };
        let said = reply.say.as_ref().map(|say| say.render(&facts)).transpose().map_err(NodeError::permanent)?;
        let mut messages = Vec::new();
        if let Some(text) = said {
            let said = message(text, self.ids);
            if spec.stream {
                stream(&ctx, &said);
            }
            messages.push(said);
        }
        for (index, value) in spec.messages.iter().enumerate() {
            messages.push(message_of(index, value, self.ids).map_err(NodeError::permanent)?);
        }
        for message in &mut messages {
            message.metadata.insert(MARK.to_owned(), ctx.node.as_str().into());
        }
        let update = Patch { messages, remove: Vec::new(), fields: spec.fields.clone() };
        Ok(Outcome { command: Command { update, goto: spec.goto.clone() }, ..Outcome::default() })
    }
}

impl From<QuestionSpec> for Interrupt {
    fn from(spec: QuestionSpec) -> Self {
        Self {
            value: spec.value,
            message: spec.message,
            reason: spec.reason.unwrap_or(Self::default().reason),
            response_schema: Some(spec.response_schema).filter(|schema| !schema.is_null()),
            ..Self::default()
        }
    }
}

/// Waits, but not longer than anybody wants the result.
async fn work(ctx: &NodeContext, time: std::time::Duration) -> Result<(), NodeError> {
    tokio::select! {
        () = tokio::time::sleep(time) => Ok(()),
        () = ctx.cancelled.cancelled() => Err(NodeError::Failed {
            code: "NODE_CANCELLED".to_owned(),
            message: "it was told to end early".to_owned(),
            retryable: true,
        }),
    }
}

/// Sends the message word by word.
fn stream(ctx: &NodeContext, whole: &Message) {
    for word in whole.plain_text().split_inclusive(' ') {
        let mut piece = whole.clone();
        piece.content = vec![crate::domain::message::text_block(word)];
        ctx.delta(piece);
    }
}

/// Which time this is since the user last spoke: from 1, by the messages the node wrote.
fn visit(ctx: &NodeContext) -> usize {
    let since = ctx.state.context.iter().rev().take_while(|message| message.role != crate::domain::Role::User);
    1 + since.filter(|message| message.metadata.get(MARK).is_some_and(|node| *node == ctx.node.as_str())).count()
}
