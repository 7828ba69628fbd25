//! Runs a graph by the pure rules alone, for tests: admission, node, advance, and what a commit does
//! with it.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::admission::{
    Admission, Answered, AnsweredQuestion, OpenQuestion, Refusal, RunInput, Start, ThreadView, admit, answers_of,
};
use super::engine::{Advance, Next, Place, RunError, advance, apply};
use super::{Graph, NodeContext, START};
use crate::domain::{Caller, JsonMap, Message, Role, RunId, StepId, ThreadId, ThreadState};

/// A thread that exists only in a test.
pub(crate) struct Rehearsal {
    pub graph: Graph,
    /// `None` until a run was accepted.
    pub state: Option<ThreadState>,
    pub last_error: Option<String>,
    pub active_run: Option<RunId>,
    /// The questions of the pause.
    pub open: Vec<OpenQuestion>,
    pub answered: Vec<AnsweredQuestion>,
    pub step_limit: i32,
    /// A stop is seen by the commit of this node's step.
    pub stop_in: Option<&'static str>,
    /// Every node that ran, in order.
    pub ran: Vec<String>,
}

/// How a rehearsed run ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ended {
    Completed,
    Interrupted,
    /// An answer was recorded; others are missing.
    StillPaused,
    Stopped,
    Failed(RunError),
}

impl Rehearsal {
    pub(crate) fn of(graph: Graph) -> Self {
        Self {
            graph,
            state: None,
            last_error: None,
            active_run: None,
            open: Vec::new(),
            answered: Vec::new(),
            step_limit: 25,
            stop_in: None,
            ran: Vec::new(),
        }
    }

    /// What admission says, without a run.
    pub(crate) fn admit(&self, input: &RunInput) -> Result<Admission, Refusal> {
        let versions = [(self.graph.version.clone(), Arc::clone(&self.graph.manifest))];
        admit(&versions, &ThreadId::from("t"), self.view().as_ref(), input)
    }

    pub(crate) fn view(&self) -> Option<ThreadView> {
        let state = self.state.as_ref()?;
        Some(ThreadView {
            graph: self.graph.manifest.name.clone(),
            graph_version: self.graph.version.clone(),
            meta: state.execution_meta.clone(),
            active_run: self.active_run,
            known_ids: state.context.iter().map(|message| message.message_id.clone()).collect(),
            last_role: state.last_message().map(|message| message.role),
            last_error: self.last_error.clone(),
            open: self.open.clone(),
            answered: self.answered.clone(),
        })
    }

    /// A whole run with a user's message.
    pub(crate) fn say(&mut self, text: &str) -> Ended {
        self.invoke(RunInput { messages: vec![Message::text(Role::User, text)], ..RunInput::default() })
            .expect("the rules accept it")
    }

    /// A whole run.
    pub(crate) fn invoke(&mut self, input: RunInput) -> Result<Ended, Refusal> {
        let admission = self.admit(&input)?;
        let manifest = &self.graph.manifest;
        let mut state = self.state.take().unwrap_or_else(|| ThreadState {
            context: Vec::new(),
            context_summary: None,
            execution_meta: admission.meta.clone(),
            fields: manifest.fields_with(&JsonMap::new()),
        });
        state.context.extend(admission.messages);
        state.fields.extend(admission.fields);
        state.execution_meta = admission.meta;
        self.record(admission.answers);
        if admission.start != Start::StillPaused {
            self.last_error = None;
            self.answered.clear();
        }
        let ended = match admission.start {
            Start::StillPaused => Ended::StillPaused,
            Start::Completed => Ended::Completed,
            Start::Interrupted => Ended::Interrupted,
            Start::Node(node) => self.run(&mut state, node),
        };
        if let Ended::Failed(error) = &ended {
            self.last_error = Some(error.code.clone());
        }
        self.state = Some(state);
        Ok(ended)
    }

    /// Moves answered questions from the open ones to the others, as a store does.
    fn record(&mut self, answers: Vec<Answered>) {
        for given in answers {
            let place = self.open.iter().position(|open| open.question.id == given.id);
            let open = self.open.remove(place.expect("the rules answer open questions only"));
            self.answered.push(AnsweredQuestion {
                question: open.question,
                status: given.status,
                answer: given.answer,
            });
        }
    }

    fn run(&mut self, state: &mut ThreadState, mut node: String) -> Ended {
        let mut seq = i32::from(node != START);
        loop {
            let advance = self.step(state, &node, seq);
            apply(state, &advance);
            let is_stopped = self.stop_in == Some(node.as_str());
            match advance.next {
                Next::Completed => return Ended::Completed,
                Next::Failed(error) => return Ended::Failed(error),
                Next::Node(_) | Next::Interrupted(_) if is_stopped => {
                    state.execution_meta = advance.stopped_meta;
                    self.stop_in = None;
                    return Ended::Stopped;
                }
                Next::Interrupted(questions) => {
                    let open = |question| OpenQuestion { question, is_expired: false };
                    self.open = questions.into_iter().map(open).collect();
                    return Ended::Interrupted;
                }
                Next::Node(next) => node = next,
            }
            seq += 1;
        }
    }

    fn step(&mut self, state: &ThreadState, node: &str, seq: i32) -> Advance {
        let place = Place { node, seq, step_limit: self.step_limit };
        let Some(code) = self.graph.nodes.get(node).cloned() else {
            return advance(&self.graph, place, state, Ok(super::Outcome::default()));
        };
        self.ran.push(node.to_owned());
        // Its own clock, paused: a node that works for an hour ends at once.
        let clock = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let result = clock.expect("a runtime of one thread").block_on(code.run(context(state, node, seq)));
        advance(&self.graph, place, state, result)
    }

    /// The plain texts of the context, with their roles.
    pub(crate) fn texts(&self) -> Vec<String> {
        let context = self.state.iter().flat_map(|state| &state.context);
        context.map(|message| format!("{}:{}", message.role.as_str(), message.plain_text())).collect()
    }

    pub(crate) fn meta(&self) -> &crate::domain::ExecutionMeta {
        &self.state.as_ref().expect("a run was accepted").execution_meta
    }
}

/// What a node sees in a test.
pub(crate) fn context(state: &ThreadState, node: &str, seq: i32) -> NodeContext {
    NodeContext {
        state: Arc::new(state.clone()),
        config: Arc::default(),
        thread_id: ThreadId::from("t"),
        step: StepId { run_id: RunId::new(), seq },
        node: node.to_owned(),
        attempt: 1,
        caller: Caller::anonymous(),
        trace: None,
        deadline: None,
        cancelled: CancellationToken::new(),
        events: super::NodeEvents::channel().0,
        answers: Arc::new(answers_of(&state.execution_meta, node)),
        asked: Arc::default(),
    }
}

/// A node that says its lines one after the other, then the last one again.
pub(crate) fn says(lines: &'static [&'static str]) -> impl super::Node + 'static {
    let visits = std::sync::atomic::AtomicUsize::new(0);
    move |_: NodeContext| {
        let visit = visits.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let line = lines[visit.min(lines.len() - 1)];
        async move { line }
    }
}
