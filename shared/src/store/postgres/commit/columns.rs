//! The parts of one or many steps as the parameters of their commit.

use sqlx::Postgres;
use sqlx::postgres::PgArguments;
use sqlx::query::{Query, QueryAs};
use uuid::Uuid;

use super::statement::Shape;
use crate::domain::Question;
use crate::store::postgres::rows::{FieldColumns, MessageColumns, count, seconds, text_of};
use crate::store::{StepCommit, Then};

/// One element per step, then messages, fields and removed positions with the step each belongs to.
#[derive(Default)]
pub(super) struct Columns {
    runs: Vec<Uuid>,
    seqs: Vec<i32>,
    tokens: Vec<Uuid>,
    bases: Vec<i64>,
    metas: Vec<String>,
    stopped: Vec<String>,
    ends: Vec<Option<&'static str>>,
    errors: Vec<Option<String>>,
    nodes: Vec<Option<String>>,
    pools: Vec<Option<String>>,
    attempts: Vec<Option<i16>>,
    added: Vec<i32>,
    removals: Vec<i32>,
    message_of: Vec<i32>,
    offsets: Vec<i32>,
    messages: MessageColumns,
    field_of: Vec<i32>,
    fields: FieldColumns,
    removed_of: Vec<i32>,
    removed: Vec<i64>,
    question_of: Vec<i32>,
    questions: QuestionColumns,
}

/// Questions as the columns of `interrupt`.
#[derive(Default)]
struct QuestionColumns {
    ids: Vec<String>,
    places: Vec<i16>,
    keys: Vec<String>,
    kinds: Vec<&'static str>,
    messages: Vec<Option<String>>,
    calls: Vec<Option<String>>,
    tools: Vec<Option<String>>,
    bodies: Vec<String>,
    on_expiry: Vec<Option<String>>,
    seconds: Vec<Option<f64>>,
}

impl QuestionColumns {
    fn push(&mut self, place: i16, question: &Question) {
        let call = question.call.as_ref();
        self.ids.push(question.id.clone());
        self.places.push(place);
        self.keys.push(question.key.clone());
        self.kinds.push(question.kind.as_str());
        self.messages.push(call.map(|call| call.message_id.text.clone()));
        self.calls.push(call.map(|call| call.call_id.clone()));
        self.tools.push(call.map(|call| call.tool.clone()));
        self.bodies.push(text_of(question));
        self.on_expiry.push(question.on_expiry.as_ref().map(text_of));
        self.seconds.push(question.expires_in.map(seconds));
    }
}

type As<'q, O> = QueryAs<'q, Postgres, O, PgArguments>;

impl Columns {
    pub(super) fn of(steps: &[&StepCommit]) -> Self {
        let mut columns = Self::default();
        for (i, step) in (1..).zip(steps) {
            columns.push(i, step);
        }
        columns
    }

    fn push(&mut self, i: i32, step: &StepCommit) {
        self.runs.push(step.step.run_id.0);
        self.seqs.push(step.step.seq);
        self.tokens.push(step.token.0);
        self.bases.push(step.base_version);
        self.metas.push(text_of(&step.meta));
        self.stopped.push(text_of(&step.stopped_meta));
        self.push_then(&step.then);
        self.added.push(count(step.messages.len()));
        self.removals.push(count(step.removed.len()));
        for (offset, message) in (0..).zip(&step.messages) {
            self.message_of.push(i);
            self.offsets.push(offset);
            self.messages.push(message);
        }
        self.field_of.extend(step.fields.iter().map(|_| i));
        self.fields.extend(&step.fields);
        self.removed_of.extend(step.removed.iter().map(|_| i));
        self.removed.extend(&step.removed);
        for (place, question) in (1..).zip(&step.questions) {
            self.question_of.push(i);
            self.questions.push(place, question);
        }
    }

    fn push_then(&mut self, then: &Then) {
        let (end, error, next) = match then {
            Then::Next { node, at } => (None, None, Some((node, at))),
            Then::End { status, error } => (Some(status.as_str()), error.as_ref(), None),
        };
        self.ends.push(end);
        self.errors.push(error.map(text_of));
        self.nodes.push(next.map(|(node, _)| node.clone()));
        self.pools.push(next.map(|(_, at)| at.pool.0.clone()));
        self.attempts.push(next.map(|(_, at)| at.attempts_max));
    }

    /// The statement that has all the parts these steps need.
    pub(super) fn shape(&self, many: bool) -> Shape {
        Shape {
            many,
            ends: self.ends.iter().any(Option::is_some),
            messages: !self.offsets.is_empty(),
            fields: !self.field_of.is_empty(),
            removed: !self.removed.is_empty(),
            questions: !self.question_of.is_empty(),
        }
    }

    /// Says that the removed messages are gone already when the commit comes.
    pub(super) fn removed_before(&mut self) {
        self.removals[0] = 0;
    }

    /// The parameters of a batch.
    pub(super) fn bind_many<'q, O>(&'q self, query: As<'q, O>, shape: Shape) -> As<'q, O> {
        let mut query = query
            .bind(&self.runs)
            .bind(&self.seqs)
            .bind(&self.tokens)
            .bind(&self.bases)
            .bind(&self.metas)
            .bind(&self.nodes)
            .bind(&self.pools)
            .bind(&self.attempts)
            .bind(&self.added);
        if shape.ends {
            query = query.bind(&self.stopped).bind(&self.ends).bind(&self.errors).bind(&self.removals);
        }
        if shape.messages {
            query = query.bind(&self.message_of);
        }
        query = self.bind_messages(query, shape);
        if shape.fields {
            query = query.bind(&self.field_of);
        }
        query = self.bind_fields(query, shape);
        if shape.removed {
            query = query.bind(&self.removed_of).bind(&self.removed);
        }
        if shape.questions {
            query = query.bind(&self.question_of);
        }
        self.bind_questions(query, shape)
    }

    /// The parameters of one step.
    pub(super) fn bind_one<'q, O>(&'q self, query: As<'q, O>, shape: Shape) -> As<'q, O> {
        let mut query = query
            .bind(self.runs[0])
            .bind(self.seqs[0])
            .bind(self.tokens[0])
            .bind(self.bases[0])
            .bind(&self.metas[0])
            .bind(&self.nodes[0])
            .bind(&self.pools[0])
            .bind(self.attempts[0])
            .bind(self.added[0]);
        if shape.ends {
            query = query.bind(&self.stopped[0]).bind(self.ends[0]).bind(&self.errors[0]).bind(self.removals[0]);
        }
        let query = self.bind_fields(self.bind_messages(query, shape), shape);
        let query = if shape.removed { query.bind(&self.removed) } else { query };
        self.bind_questions(query, shape)
    }

    /// The parameters of the removal that goes ahead of one step's commit.
    pub(super) fn bind_removal<'q>(
        &'q self,
        query: Query<'q, Postgres, PgArguments>,
    ) -> Query<'q, Postgres, PgArguments> {
        query.bind(self.runs[0]).bind(self.seqs[0]).bind(self.tokens[0]).bind(self.bases[0]).bind(&self.removed)
    }

    fn bind_messages<'q, O>(&'q self, query: As<'q, O>, shape: Shape) -> As<'q, O> {
        if !shape.messages {
            return query;
        }
        query.bind(&self.offsets).bind(&self.messages.ids).bind(&self.messages.roles).bind(&self.messages.bodies)
    }

    fn bind_questions<'q, O>(&'q self, query: As<'q, O>, shape: Shape) -> As<'q, O> {
        if !shape.questions {
            return query;
        }
        let asked = &self.questions;
        query
            .bind(&asked.ids)
            .bind(&asked.places)
            .bind(&asked.keys)
            .bind(&asked.kinds)
            .bind(&asked.messages)
            .bind(&asked.calls)
            .bind(&asked.tools)
            .bind(&asked.bodies)
            .bind(&asked.on_expiry)
            .bind(&asked.seconds)
    }

    fn bind_fields<'q, O>(&'q self, query: As<'q, O>, shape: Shape) -> As<'q, O> {
        if !shape.fields {
            return query;
        }
        query.bind(&self.fields.names).bind(&self.fields.values)
    }
}
