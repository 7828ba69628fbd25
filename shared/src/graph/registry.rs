//! The graphs a program can run.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Graph, GraphError};

/// The graphs a program can run, by name.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    graphs: Vec<Arc<Graph>>,
}

impl Registry {
    /// No graphs yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a graph.
    #[must_use]
    pub fn graph(mut self, graph: Graph) -> Self {
        self.graphs.push(Arc::new(graph));
        self
    }

    /// All graphs, in the order they were added.
    #[must_use]
    pub fn graphs(&self) -> &[Arc<Graph>] {
        &self.graphs
    }

    /// Whether no name is there twice; a program asks before it starts.
    ///
    /// # Errors
    /// `GRAPH_000` names the graph.
    pub fn check(&self) -> Result<(), GraphError> {
        let mut seen = HashSet::new();
        match self.graphs.iter().find(|graph| !seen.insert(graph.manifest.name.as_str())) {
            Some(twice) => Err(GraphError {
                code: "GRAPH_000",
                message: format!("two graphs are called '{}'; rename one", twice.manifest.name),
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{END, NodeContext};

    fn graph(name: &str, version: &str) -> Graph {
        let say = |_: NodeContext| async { "hi" };
        Graph::builder(name).node("say", say).entry("say").edge("say", END).version(version).build().unwrap()
    }

    #[test]
    fn two_graphs_of_one_name_are_refused() {
        let error = Registry::new().graph(graph("a", "1")).graph(graph("a", "2")).check().unwrap_err();

        assert_eq!((error.code, error.message.as_str()), ("GRAPH_000", "two graphs are called 'a'; rename one"));
    }
}
