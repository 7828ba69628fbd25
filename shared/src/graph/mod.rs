//! Graphs: nodes, edges, state fields and pauses; immutable, named by their content.

pub mod admission;
pub mod builder;
mod cel_json;
pub mod declarative;
pub mod engine;
pub mod expression;
pub mod ids;
pub mod manifest;
pub mod node;
pub mod registry;
#[cfg(test)]
mod rehearsal;
pub mod reply;
pub mod said;
pub mod tools;
#[cfg(test)]
mod vectors;
#[cfg(test)]
mod vectors_answers;

use std::collections::HashMap;
use std::sync::Arc;

pub use builder::{GraphBuilder, IntoRoute};
pub use manifest::{EdgeSpec, FieldSpec, IdKind, Manifest, NodePolicy, NodeSpec, Reducer, RetryPolicy};
pub use node::{Command, Interrupt, IntoOutcome, Node, NodeContext, NodeError, Outcome, Patch};
pub use registry::Registry;
pub use said::{NodeEvent, NodeEvents};
pub use tools::{Tool, ToolContext, ToolError, ToolSet};

pub use crate::domain::meta::{END, START};
use crate::domain::{GraphVersion, Json, ThreadState};

/// What a conditional edge's condition returned.
///
/// With a mapping the value picks an entry by equality; without one a string names the target.
pub type Condition = Arc<dyn Fn(&ThreadState) -> Result<Json, String> + Send + Sync>;

/// A graph that can be run: the manifest and the code behind its names.
#[derive(Clone)]
pub struct Graph {
    /// What the graph is; all that introspection and admission need.
    pub manifest: Arc<Manifest>,
    /// The content hash of the manifest.
    pub version: GraphVersion,
    /// The code of each node, by name.
    pub nodes: HashMap<String, Arc<dyn Node>>,
    /// The tools of each `tools` node, by the node's name.
    pub tools: HashMap<String, Arc<ToolSet>>,
    /// The conditions of `manifest.edges`, by the edge's index.
    pub conditions: HashMap<usize, Condition>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph")
            .field("name", &self.manifest.name)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// Why a graph cannot be built or a node's target not be followed; the code is the wire's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("[{code}] {message}")]
pub struct GraphError {
    /// `GRAPH_002` …, `GRAPH_ROUTING_001`.
    pub code: &'static str,
    /// A sentence for the graph's author.
    pub message: String,
}
