//! Conditions and values in CEL: compiled once, checked for names and cost, evaluated on the state.
//!
//! CEL as such has no cost limit, so three things bound it: the length of the text, the depth of
//! what it says (evaluating recurses), and the number of elements that nested macros may visit,
//! which is refused before it is spent.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cel::common::ast::{ComprehensionExpr, EntryExpr, Expr};
use cel::{Context, IdedExpr, Program};

use super::cel_json::{Importer, to_json};
use crate::domain::{Json, JsonMap, Message, Role, ThreadState};

/// The longest expression, in bytes.
pub const TEXT_BYTES_MAX: usize = 2_000;

/// How deep an expression may nest; each link of a chain such as `a + b + c` is a level.
pub const DEPTH_MAX: usize = 24;

/// The stack for reading an expression, before its depth is known.
const READING_STACK_BYTES: usize = 64 * 1024 * 1024;

/// How many elements the macros (`all`, `exists`, `map`, `filter`) of one evaluation may visit.
pub const ELEMENTS_MAX: usize = 100_000;

/// Which names an expression may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On an edge: `state`, `messages`, `last`, `user_text`, `meta`, `thread_id`.
    Edge,
    /// In a node: also `config`, `attempt`, `visit`, `answer`.
    Node,
}

impl Place {
    /// The names.
    #[must_use]
    pub fn names(self) -> &'static [&'static str] {
        const NAMES: [&str; 10] =
            ["state", "messages", "last", "user_text", "meta", "thread_id", "config", "attempt", "visit", "answer"];
        match self {
            Self::Edge => &NAMES[..6],
            Self::Node => &NAMES,
        }
    }
}

/// What is wrong with an expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpressionError {
    /// A sentence.
    pub message: String,
    /// What to do.
    pub fix: String,
    /// Line and column in the expression, from 1.
    pub at: Option<(usize, usize)>,
}

/// A compiled expression.
#[derive(Debug)]
pub struct Expression {
    program: Program,
    names: BTreeSet<String>,
    cost: Cost,
}

/// What an expression's macros multiply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Cost {
    /// Macros in all.
    loops: usize,
    /// Macros inside macros, at most.
    depth: usize,
    /// The longest list or map that is written out.
    literal: usize,
    /// How often lists could be joined.
    joins: usize,
}

/// What an expression sees.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// The thread's state.
    pub state: &'a ThreadState,
    /// What only a node sees; empty on an edge.
    pub node: Option<&'a NodeFacts<'a>>,
}

/// What only a node sees.
#[derive(Debug, Clone, Copy)]
pub struct NodeFacts<'a> {
    /// The run's configuration.
    pub config: &'a JsonMap,
    /// From 1; more after a crash or a retry.
    pub attempt: u16,
    /// From 1; see [`super::declarative::ScriptedSpec`].
    pub visit: usize,
    /// The answer to the node's question.
    pub answer: Option<&'a Json>,
}

impl Expression {
    /// Compiles `text`, whose state has the fields `fields`; `None` = any.
    ///
    /// # Errors
    /// [`ExpressionError`] for what is no CEL, too long, or names what is not there.
    pub fn compile(text: &str, place: Place, fields: Option<&[String]>) -> Result<Self, ExpressionError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(ExpressionError {
                message: format!("the expression has {} bytes; at most {TEXT_BYTES_MAX} are taken", text.len()),
                fix: "shorten it, or do this in a node".to_owned(),
                at: None,
            });
        }
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(READING_STACK_BYTES);
            let reading = thread.spawn_scoped(scope, || Self::read(text, place, fields));
            let read = reading.map_err(|error| error.to_string()).map(std::thread::ScopedJoinHandle::join);
            match read {
                Ok(Ok(read)) => read,
                Ok(Err(_)) => Err(parse_error("the parser gave up", None)),
                Err(error) => Err(parse_error(&format!("no thread to read it on: {error}"), None)),
            }
        })
    }

    fn read(text: &str, place: Place, fields: Option<&[String]>) -> Result<Self, ExpressionError> {
        let program = Program::compile(text).map_err(|errors| {
            let error = errors.errors.first();
            let at = error.and_then(|e| Some((usize::try_from(e.pos.0).ok()?, usize::try_from(e.pos.1).ok()?)));
            parse_error(error.map_or("it cannot be read", |error| first_line(&error.msg)), at)
        })?;
        let mut survey = Survey {
            text,
            program: &program,
            place,
            fields,
            level: 0,
            bound: Vec::new(),
            names: BTreeSet::new(),
            cost: Cost::default(),
        };
        let depth = survey.visit(program.expression())?;
        let (names, cost) = (std::mem::take(&mut survey.names), Cost { depth, ..survey.cost });
        Ok(Self { program, names, cost })
    }

    /// The expression's value.
    ///
    /// # Errors
    /// Why there is none: a name without a value, types that do not fit, or too many elements.
    pub fn evaluate(&self, facts: &Facts<'_>) -> Result<Json, String> {
        let mut importer = Importer::default();
        let mut context = Context::default();
        for name in &self.names {
            let value = importer.value(&value_of(name, facts)?);
            context.add_variable_from_value(name.as_str(), value);
        }
        self.check_cost(importer.longest)?;
        let result = catch_unwind(AssertUnwindSafe(|| self.program.execute(&context)));
        let value = result.map_err(|_| "the expression could not be evaluated".to_owned())?;
        to_json(&value.map_err(|error| error.to_string())?)
    }

    fn check_cost(&self, longest: usize) -> Result<(), String> {
        let elements = longest.max(self.cost.literal).saturating_mul(self.cost.joins + 1);
        let depth = u32::try_from(self.cost.depth).unwrap_or(u32::MAX);
        let visits = elements.saturating_pow(depth).saturating_mul(self.cost.loops);
        if self.cost.depth == 0 || visits <= ELEMENTS_MAX {
            return Ok(());
        }
        Err(format!(
            "the expression's macros could visit {visits} elements, at most {ELEMENTS_MAX} are allowed; look at less, or do this in a node of your own"
        ))
    }
}

fn value_of(name: &str, facts: &Facts<'_>) -> Result<Json, String> {
    let state = facts.state;
    let node = || facts.node.ok_or_else(|| format!("'{name}' exists only in nodes"));
    Ok(match name {
        "state" => {
            let mut fields = state.fields.clone();
            fields.insert("context_summary".to_owned(), state.context_summary.clone().unwrap_or(Json::Null));
            Json::Object(fields)
        }
        "messages" => state.context.iter().map(message_json).collect(),
        "last" => state.last_message().map_or(Json::Null, message_json),
        "user_text" => user_text(state).into(),
        "meta" => serde_json::json!({
            "current_node": state.execution_meta.current_node, "step": state.execution_meta.step,
        }),
        "thread_id" => state.execution_meta.thread_id.clone().into(),
        "config" => Json::Object(node()?.config.clone()),
        "attempt" => node()?.attempt.into(),
        "visit" => node()?.visit.into(),
        "answer" => node()?.answer.cloned().unwrap_or(Json::Null),
        other => return Err(format!("there is no '{other}' here")),
    })
}

/// The plain text of the newest user message; empty if there is none.
pub(crate) fn user_text(state: &ThreadState) -> String {
    let user = state.context.iter().rev().find(|message| message.role == Role::User);
    user.map(Message::plain_text).unwrap_or_default()
}

/// A message as expressions see it: the wire form, and its plain text as `text`.
fn message_json(message: &Message) -> Json {
    let mut json = crate::domain::state::to_json(message);
    json["text"] = message.plain_text().into();
    json
}

fn parse_error(why: &str, at: Option<(usize, usize)>) -> ExpressionError {
    ExpressionError {
        message: format!("this is no CEL expression: {why}"),
        fix: "see https://cel.dev for the language; text needs quotes of its own".to_owned(),
        at,
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// Walks the expression once: which names it uses, whether they exist, and what its macros cost.
struct Survey<'a> {
    text: &'a str,
    program: &'a Program,
    place: Place,
    fields: Option<&'a [String]>,
    level: usize,
    /// Variables that macros around the current part have bound.
    bound: Vec<String>,
    names: BTreeSet<String>,
    cost: Cost,
}

impl Survey<'_> {
    /// Returns how deep macros nest in `part`.
    fn visit(&mut self, part: &IdedExpr) -> Result<usize, ExpressionError> {
        if self.level == DEPTH_MAX {
            let fix = "split it, or do this in a node".to_owned();
            return Err(self.unknown(part, format!("the expression nests deeper than {DEPTH_MAX} levels"), fix));
        }
        self.level += 1;
        let depth = self.visit_inside(part)?;
        self.level -= 1;
        Ok(depth)
    }

    fn visit_inside(&mut self, part: &IdedExpr) -> Result<usize, ExpressionError> {
        match &part.expr {
            Expr::Unspecified | Expr::Literal(_) => Ok(0),
            Expr::Ident(name) => self.name(part, name).map(|()| 0),
            Expr::Select(select) => {
                if !select.test && matches!(&select.operand.expr, Expr::Ident(name) if name == "state") {
                    self.field(part, &select.field)?;
                }
                self.visit(&select.operand)
            }
            Expr::Call(call) => {
                self.function(part, &call.func_name)?;
                self.cost.joins += usize::from(call.func_name == "_+_");
                self.deepest(call.target.as_deref().into_iter().chain(&call.args))
            }
            Expr::List(list) => {
                self.cost.literal = self.cost.literal.max(list.elements.len());
                self.deepest(&list.elements)
            }
            Expr::Map(map) => {
                self.cost.literal = self.cost.literal.max(map.entries.len());
                self.deepest(map.entries.iter().flat_map(|entry| entry_parts(&entry.expr)))
            }
            Expr::Struct(object) => self.deepest(object.entries.iter().flat_map(|entry| entry_parts(&entry.expr))),
            Expr::Comprehension(each) => self.comprehension(each),
        }
    }

    fn comprehension(&mut self, each: &ComprehensionExpr) -> Result<usize, ExpressionError> {
        let range = self.deepest([&each.iter_range, &each.accu_init])?;
        let (before, joins) = (self.bound.len(), self.cost.joins);
        self.cost.loops += 1;
        self.bound.extend([each.iter_var.clone(), each.accu_var.clone()]);
        self.bound.extend(each.iter_var2.clone());
        let body = self.deepest([&each.loop_cond, &each.loop_step, &each.result])?;
        self.bound.truncate(before);
        // The macro's own step appends one element, which is no join of two lists.
        self.cost.joins = self.cost.joins.saturating_sub(1).max(joins);
        Ok(range.max(body + 1))
    }

    fn deepest<'e>(&mut self, parts: impl IntoIterator<Item = &'e IdedExpr>) -> Result<usize, ExpressionError> {
        parts.into_iter().try_fold(0, |deepest, part| Ok(deepest.max(self.visit(part)?)))
    }

    fn name(&mut self, part: &IdedExpr, name: &str) -> Result<(), ExpressionError> {
        if self.bound.iter().any(|bound| bound == name) || is_type(name) {
            return Ok(());
        }
        let known = self.place.names();
        if !known.contains(&name) {
            let fix = suggestion(name, known.iter().copied());
            return Err(self.unknown(part, format!("there is no '{name}' here"), fix));
        }
        self.names.insert(name.to_owned());
        Ok(())
    }

    fn field(&self, part: &IdedExpr, field: &str) -> Result<(), ExpressionError> {
        let Some(fields) = self.fields else { return Ok(()) };
        if field == "context_summary" || fields.iter().any(|known| known == field) {
            return Ok(());
        }
        let fix = suggestion(field, fields.iter().map(String::as_str));
        Err(self.unknown(part, format!("the state has no field '{field}'"), fix))
    }

    fn function(&self, part: &IdedExpr, name: &str) -> Result<(), ExpressionError> {
        let is_operator = !name.starts_with(|c: char| c.is_ascii_alphabetic());
        if is_operator || FUNCTIONS.contains(&name) {
            return Ok(());
        }
        let fix = suggestion(name, FUNCTIONS.iter().copied());
        Err(self.unknown(part, format!("there is no function '{name}'"), fix))
    }

    fn unknown(&self, part: &IdedExpr, message: String, fix: String) -> ExpressionError {
        let start = self.program.source_info().offset_for(part.id).map(|(start, _)| start as usize);
        let at = start.map(|start| {
            let before: String = self.text.chars().take(start).collect();
            let line = before.matches('\n').count() + 1;
            (line, before.chars().rev().take_while(|c| *c != '\n').count() + 1)
        });
        ExpressionError { message, fix, at }
    }
}

fn entry_parts(entry: &EntryExpr) -> Vec<&IdedExpr> {
    match entry {
        EntryExpr::StructField(field) => vec![&field.value],
        EntryExpr::MapEntry(entry) => vec![&entry.key, &entry.value],
    }
}

/// The functions and macros of CEL's standard library.
const FUNCTIONS: [&str; 33] = [
    "size",
    "contains",
    "startsWith",
    "endsWith",
    "matches",
    "string",
    "bytes",
    "int",
    "uint",
    "double",
    "bool",
    "type",
    "dyn",
    "has",
    "all",
    "exists",
    "exists_one",
    "map",
    "filter",
    "duration",
    "timestamp",
    "getFullYear",
    "getMonth",
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getHours",
    "getMinutes",
    "getSeconds",
    "getMilliseconds",
    "orValue",
    "hasValue",
];

fn is_type(name: &str) -> bool {
    matches!(name, "int" | "uint" | "double" | "bool" | "string" | "bytes" | "list" | "map" | "null_type" | "type")
}

/// `did you mean 'x'?`, or what there is.
pub(crate) fn suggestion<'a>(name: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    let distance = |other: &str| strsim::damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    let nearest = known.clone().map(|other| (distance(other), other)).min();
    match nearest {
        Some((distance, other)) if distance <= 1 + name.len() / 4 => format!("did you mean '{other}'?"),
        Some(_) => format!("there is {}", known.map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")),
        None => "there is none".to_owned(),
    }
}

#[cfg(test)]
mod tests;
