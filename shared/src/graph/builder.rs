//! Building a graph in Rust, and the checks that every graph passes, however it was written.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::manifest::RETRY_ATTEMPTS_MAX;
use super::tools::{self, ToolSet};
use super::{Condition, EdgeSpec, FieldSpec, Graph, GraphError, IdKind, Manifest, Node, NodePolicy, NodeSpec, Reducer};
use crate::domain::meta::{END, START};
use crate::domain::state::ENGINE_FIELDS;
use crate::domain::{Json, ThreadState, ToolsSpec};

/// The kind of nodes that run tools.
pub const TOOLS: &str = "tools";

/// Field names of a run's input that are not the graph's.
const INPUT_FIELDS: [&str; 2] = ["current_node", "messages"];

/// What a condition may return.
pub trait IntoRoute {
    /// The value: a mapping's key, or the name of the target.
    ///
    /// # Errors
    /// Why the condition cannot say; the run fails with `GRAPH_ROUTING_001`.
    fn into_route(self) -> Result<Json, String>;
}

impl IntoRoute for Json {
    fn into_route(self) -> Result<Json, String> {
        Ok(self)
    }
}

impl IntoRoute for &str {
    fn into_route(self) -> Result<Json, String> {
        Ok(self.into())
    }
}

impl IntoRoute for String {
    fn into_route(self) -> Result<Json, String> {
        Ok(self.into())
    }
}

impl IntoRoute for bool {
    fn into_route(self) -> Result<Json, String> {
        Ok(self.into())
    }
}

impl<T: IntoRoute, E: std::fmt::Display> IntoRoute for Result<T, E> {
    fn into_route(self) -> Result<Json, String> {
        self.map_err(|error| error.to_string())?.into_route()
    }
}

/// Collects the parts of a graph; [`GraphBuilder::build`] checks them.
pub struct GraphBuilder {
    manifest: Manifest,
    nodes: HashMap<String, Arc<dyn Node>>,
    tools: HashMap<String, Arc<ToolSet>>,
    conditions: HashMap<usize, Condition>,
    version: Option<String>,
}

impl Graph {
    /// Begins a graph written in Rust.
    #[must_use]
    pub fn builder(name: impl Into<String>) -> GraphBuilder {
        GraphBuilder {
            manifest: Manifest {
                name: name.into(),
                code: true,
                nodes: Vec::new(),
                edges: Vec::new(),
                interrupt_before: Vec::new(),
                interrupt_after: Vec::new(),
                fields: Vec::new(),
                state_type: "AgentState".to_owned(),
                ids: IdKind::String,
                thread_name: None,
            },
            nodes: HashMap::new(),
            tools: HashMap::new(),
            conditions: HashMap::new(),
            version: None,
        }
    }
}

impl GraphBuilder {
    /// Adds a state field with the value it has on a new thread.
    #[must_use]
    pub fn field(self, name: impl Into<String>, default: impl Into<Json>) -> Self {
        let (name, default) = (name.into(), default.into());
        self.field_spec(FieldSpec { name, default, reducer: Reducer::default(), schema: Json::Null })
    }

    /// Adds a state field with its reducer and the JSON Schema of its values.
    #[must_use]
    pub fn field_spec(mut self, field: FieldSpec) -> Self {
        self.manifest.fields.push(field);
        self
    }

    /// Adds a node: an async function, or anything that is a [`Node`].
    #[must_use]
    pub fn node(self, name: impl Into<String>, node: impl Node + 'static) -> Self {
        self.node_with(name, node, NodePolicy::default())
    }

    /// Adds a node with its pool, deadline and retries.
    #[must_use]
    pub fn node_with(mut self, name: impl Into<String>, node: impl Node + 'static, policy: NodePolicy) -> Self {
        let name = name.into();
        self.manifest.nodes.push(NodeSpec { name: name.clone(), kind: "code".to_owned(), spec: Json::Null, policy });
        self.nodes.insert(name, Arc::new(node));
        self
    }

    /// Adds a node that runs the calls of the last assistant message, asks for approvals, and adds the
    /// results.
    #[must_use]
    pub fn tools(self, name: impl Into<String>, tools: ToolSet) -> Self {
        self.tools_with(name, tools, NodePolicy::default())
    }

    /// Adds a `tools` node with its pool, deadline and retries.
    #[must_use]
    pub fn tools_with(mut self, name: impl Into<String>, tools: ToolSet, policy: NodePolicy) -> Self {
        let name = name.into();
        let spec = serde_json::to_value(tools.spec()).expect("a spec has string keys");
        self.manifest.nodes.push(NodeSpec { name: name.clone(), kind: TOOLS.to_owned(), spec, policy });
        self.tools.insert(name, Arc::new(tools));
        self
    }

    /// Adds a static edge; from [`START`] it names the entry. Of several static edges of one node
    /// the first counts.
    #[must_use]
    pub fn edge(mut self, source: impl Into<String>, target: impl Into<String>) -> Self {
        let (source, target) = (source.into(), Some(target.into()));
        self.manifest.edges.push(EdgeSpec { source, target, condition: None, mapping: None });
        self
    }

    /// The first node.
    #[must_use]
    pub fn entry(self, node: impl Into<String>) -> Self {
        self.edge(START, node)
    }

    /// Adds a conditional edge whose condition names the target.
    #[must_use]
    pub fn conditional<R: IntoRoute>(
        self,
        source: impl Into<String>,
        route: impl Fn(&ThreadState) -> R + Send + Sync + 'static,
    ) -> Self {
        self.conditional_edge(source.into(), route, None)
    }

    /// Adds a conditional edge whose condition's value picks the target by equality; where no entry
    /// equals it, the next edge counts.
    #[must_use]
    pub fn conditional_map<R: IntoRoute, K: Into<Json>, T: Into<String>>(
        self,
        source: impl Into<String>,
        route: impl Fn(&ThreadState) -> R + Send + Sync + 'static,
        mapping: impl IntoIterator<Item = (K, T)>,
    ) -> Self {
        let mapping = mapping.into_iter().map(|(key, target)| (key.into(), target.into())).collect();
        self.conditional_edge(source.into(), route, Some(mapping))
    }

    fn conditional_edge<R: IntoRoute>(
        mut self,
        source: String,
        route: impl Fn(&ThreadState) -> R + Send + Sync + 'static,
        mapping: Option<Vec<(Json, String)>>,
    ) -> Self {
        let condition: Condition = Arc::new(move |state| route(state).into_route());
        self.conditions.insert(self.manifest.edges.len(), condition);
        self.manifest.edges.push(EdgeSpec { source, target: None, condition: Some("code".to_owned()), mapping });
        self
    }

    /// Pauses every run before these nodes.
    #[must_use]
    pub fn interrupt_before<T: Into<String>>(mut self, nodes: impl IntoIterator<Item = T>) -> Self {
        self.manifest.interrupt_before.extend(nodes.into_iter().map(Into::into));
        self
    }

    /// Pauses every run after these nodes.
    #[must_use]
    pub fn interrupt_after<T: Into<String>>(mut self, nodes: impl IntoIterator<Item = T>) -> Self {
        self.manifest.interrupt_after.extend(nodes.into_iter().map(Into::into));
        self
    }

    /// How generated ids look; default uuid v4.
    #[must_use]
    pub fn ids(mut self, ids: IdKind) -> Self {
        self.manifest.ids = ids;
        self
    }

    /// The name of the state type that introspection shows; default `AgentState`.
    #[must_use]
    pub fn state_type(mut self, name: impl Into<String>) -> Self {
        self.manifest.state_type = name.into();
        self
    }

    /// How new threads are named: text in which `{messages}` stands for the number of messages.
    #[must_use]
    pub fn thread_name(mut self, template: impl Into<String>) -> Self {
        self.manifest.thread_name = Some(template.into());
        self
    }

    /// What tells two builds of the code apart, for instance `env!("CARGO_PKG_VERSION")`: runs stay
    /// on the version they started with. Default: this library's version.
    #[must_use]
    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.version = Some(version.into());
        self
    }

    /// Checks the graph.
    ///
    /// # Errors
    /// The first of [`problems`].
    pub fn build(self) -> Result<Graph, GraphError> {
        if let Some(problem) = problems(&self.manifest).into_iter().next() {
            return Err(problem.error);
        }
        let fingerprint = self.version.unwrap_or_else(|| env!("CARGO_PKG_VERSION").to_owned());
        let version = self.manifest.version(Some(&fingerprint));
        Ok(Graph {
            manifest: Arc::new(self.manifest),
            version,
            nodes: self.nodes,
            tools: self.tools,
            conditions: self.conditions,
        })
    }
}

/// Something wrong with a manifest, and what it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The part of the manifest.
    pub about: About,
    /// Code and sentence.
    pub error: GraphError,
}

/// A part of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum About {
    /// The graph's name.
    Name,
    /// The edges together: the entry.
    Entry,
    /// The node at this place of the list.
    Node(usize),
    /// The edge at this place of the list.
    Edge(usize),
    /// The field at this place of the list.
    Field(usize),
    /// The entry at this place of `interrupt_before`.
    InterruptBefore(usize),
    /// The entry at this place of `interrupt_after`.
    InterruptAfter(usize),
}

/// All that keeps `manifest` from being a graph: `GRAPH_002` no entry, `GRAPH_003` a node without
/// an edge, `GRAPH_004` an unknown name in an edge or a pause list, `GRAPH_000` everything else.
#[must_use]
pub fn problems(manifest: &Manifest) -> Vec<Problem> {
    let mut found = Vec::new();
    if manifest.name.trim().is_empty() || manifest.name.len() > 255 || manifest.name.contains(char::is_control) {
        let message = "a graph's name has 1 to 255 bytes and no control characters; give it one".to_owned();
        found.push(problem(About::Name, "GRAPH_000", message));
    }
    node_problems(manifest, &mut found);
    field_problems(manifest, &mut found);
    edge_problems(manifest, &mut found);
    pause_problems(manifest, &mut found);
    found
}

fn problem(about: About, code: &'static str, message: String) -> Problem {
    Problem { about, error: GraphError { code, message } }
}

fn node_problems(manifest: &Manifest, found: &mut Vec<Problem>) {
    let mut seen = HashSet::new();
    for (index, node) in manifest.nodes.iter().enumerate() {
        let name = &node.name;
        let mut wrong = |code, message| found.push(problem(About::Node(index), code, message));
        if name.trim().is_empty() || name.len() > 255 || name.contains(char::is_control) {
            wrong("GRAPH_000", "a node's name has 1 to 255 bytes and no control characters; give it one".to_owned());
        } else if name == START || name == END {
            wrong("GRAPH_000", format!("'{name}' is a name of the engine; give the node another"));
        } else if !seen.insert(name) {
            wrong("GRAPH_000", format!("the node '{name}' is there twice; rename or remove one"));
        }
        if let Some(why) = policy_problem(&node.policy) {
            wrong("GRAPH_000", format!("node '{name}': {why}"));
        }
        for (code, why) in tool_problems(manifest, node) {
            wrong(code, format!("node '{name}': {why}"));
        }
        let has_edge = manifest.edges.iter().any(|edge| edge.source == *name || edge_targets(edge).any(|t| t == name));
        if !has_edge {
            let message = format!("no edge begins or ends at node '{name}'; add one, or remove the node");
            wrong("GRAPH_003", message);
        }
    }
}

fn tool_problems(manifest: &Manifest, node: &NodeSpec) -> Vec<(&'static str, String)> {
    if node.kind != TOOLS {
        return Vec::new();
    }
    match serde_json::from_value::<ToolsSpec>(node.spec.clone()) {
        Ok(spec) => tools::problems(&spec, |target| manifest.is_place(target)),
        Err(error) => vec![("GRAPH_000", format!("its tools cannot be read: {error}"))],
    }
}

fn policy_problem(policy: &NodePolicy) -> Option<String> {
    let pool = policy.pool.as_str();
    let is_pool_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if pool.is_empty() || pool.len() > 63 || !pool.chars().all(is_pool_char) {
        return Some(format!("'{pool}' cannot name a pool; use 1 to 63 letters, digits, '-', '_' or '.'"));
    }
    if policy.timeout_ms == Some(0) {
        return Some("its timeout is 0; leave it out for the run's own".to_owned());
    }
    if policy.retry.attempts == 0 {
        return Some("its retry has 0 attempts; 1 means no retry".to_owned());
    }
    if policy.retry.attempts > RETRY_ATTEMPTS_MAX {
        return Some(format!(
            "its retry has more than {RETRY_ATTEMPTS_MAX} attempts; choose fewer, with a longer delay"
        ));
    }
    if policy.retry.delay_min_ms > policy.retry.delay_max_ms {
        return Some("its retry's delay_min is longer than delay_max; swap them".to_owned());
    }
    None
}

fn field_problems(manifest: &Manifest, found: &mut Vec<Problem>) {
    let mut seen = HashSet::new();
    for (index, field) in manifest.fields.iter().enumerate() {
        let name = field.name.as_str();
        let mut wrong = |message| found.push(problem(About::Field(index), "GRAPH_000", message));
        if name.trim().is_empty() || name.len() > 255 || name.contains(char::is_control) {
            wrong("a field's name has 1 to 255 bytes and no control characters; give it one".to_owned());
        } else if ENGINE_FIELDS.contains(&name) || INPUT_FIELDS.contains(&name) || name.starts_with("__") {
            wrong(format!("the field '{name}' belongs to the engine; give it another name"));
        } else if !seen.insert(name) {
            wrong(format!("the field '{name}' is there twice; remove one"));
        }
        if field.schema.is_null() {
            continue;
        }
        match jsonschema::validator_for(&field.schema) {
            Err(error) => wrong(format!("the schema of field '{name}' is no JSON Schema: {error}")),
            Ok(schema) if !field.default.is_null() && !schema.is_valid(&field.default) => {
                wrong(format!("the default of field '{name}' does not satisfy the field's schema; change one of them"));
            }
            Ok(_) => {}
        }
    }
}

fn edge_problems(manifest: &Manifest, found: &mut Vec<Problem>) {
    if !manifest.edges.iter().any(|edge| edge.source == START) {
        let message = "the graph has no entry point; name the node it starts with".to_owned();
        found.push(problem(About::Entry, "GRAPH_002", message));
    }
    for (index, edge) in manifest.edges.iter().enumerate() {
        let mut wrong = |message| found.push(problem(About::Edge(index), "GRAPH_004", message));
        if edge.source == END {
            wrong(format!("an edge begins at {END}, where a run ends; remove it"));
        } else if !manifest.is_place(&edge.source) {
            let known = known_names(manifest);
            wrong(format!("an edge begins at '{}', which is not a node; the nodes are {known}", edge.source));
        }
        for target in edge_targets(edge).filter(|target| !manifest.is_place(target)) {
            let known = known_names(manifest);
            let source = &edge.source;
            wrong(format!("the edge from '{source}' leads to '{target}', which is not a node; the nodes are {known}"));
        }
    }
}

fn pause_problems(manifest: &Manifest, found: &mut Vec<Problem>) {
    let before = manifest.interrupt_before.iter().enumerate().map(|(i, name)| (About::InterruptBefore(i), name));
    let after = manifest.interrupt_after.iter().enumerate().map(|(i, name)| (About::InterruptAfter(i), name));
    for (about, name) in before.chain(after) {
        if manifest.node(name).is_none() {
            let list = if matches!(about, About::InterruptBefore(_)) { "interrupt_before" } else { "interrupt_after" };
            let known = known_names(manifest);
            let message = format!("{list} names '{name}', which is not a node; the nodes are {known}");
            found.push(problem(about, "GRAPH_004", message));
        }
    }
}

fn known_names(manifest: &Manifest) -> String {
    let names: Vec<String> = manifest.nodes.iter().map(|node| format!("'{}'", node.name)).collect();
    if names.is_empty() { "none yet".to_owned() } else { names.join(", ") }
}

/// Where an edge may lead, as far as the manifest says.
pub(crate) fn edge_targets(edge: &EdgeSpec) -> impl Iterator<Item = &String> {
    edge.target.iter().chain(edge.mapping.iter().flatten().map(|(_, target)| target))
}

/// Nodes that no run can reach over the edges from `__start__`; only a `goto` or a condition that
/// names its target could. Empty where a condition may name any node.
#[must_use]
pub fn unreachable_nodes(manifest: &Manifest) -> Vec<usize> {
    let mut reached: HashSet<&str> = HashSet::from([START]);
    let mut open = vec![START];
    while let Some(place) = open.pop() {
        for edge in manifest.edges.iter().filter(|edge| edge.source == place) {
            if edge.condition.is_some() && edge.mapping.is_none() {
                return Vec::new();
            }
            open.extend(edge_targets(edge).map(String::as_str).filter(|target| reached.insert(target)));
        }
    }
    let nodes = manifest.nodes.iter().enumerate();
    nodes.filter(|(_, node)| !reached.contains(node.name.as_str())).map(|(index, _)| index).collect()
}

#[cfg(test)]
mod tests;
