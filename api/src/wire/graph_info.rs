//! What `GET /v1/graph` tells of a graph.

use serde::Serialize;
use threadgate_shared::domain::meta::{END, START};
use threadgate_shared::domain::state::ENGINE_FIELDS;
use threadgate_shared::graph::{IdKind, Manifest};
use utoipa::ToSchema;
use uuid::Uuid;

/// A graph as clients see it.
#[derive(Debug, Serialize, ToSchema)]
pub struct GraphDetails {
    /// Figures and settings.
    pub info: GraphInfo,
    /// Its nodes, `__start__` and `__end__` included.
    pub nodes: Vec<NodeView>,
    /// Its edges; a conditional one counts once per target.
    pub edges: Vec<EdgeView>,
}

/// Figures and settings of a graph.
#[derive(Debug, Serialize, ToSchema)]
pub struct GraphInfo {
    node_count: usize,
    edge_count: usize,
    is_realtime: bool,
    checkpointer: bool,
    checkpointer_type: String,
    publisher: bool,
    store: bool,
    interrupt_before: Vec<String>,
    interrupt_after: Vec<String>,
    context_type: &'static str,
    id_generator: &'static str,
    id_type: &'static str,
    state_type: String,
    state_fields: Vec<String>,
}

/// One node; its id is new with every answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct NodeView {
    id: Uuid,
    name: String,
}

/// One edge; its id is new with every answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct EdgeView {
    id: Uuid,
    source: String,
    /// Empty where a condition itself names the target.
    target: String,
}

impl GraphDetails {
    /// What the manifest says.
    #[must_use]
    pub fn of(manifest: &Manifest, checkpointer: &str) -> Self {
        let names = [START, END].into_iter().chain(manifest.nodes.iter().map(|node| node.name.as_str()));
        let nodes: Vec<NodeView> = names.map(|name| NodeView { id: Uuid::new_v4(), name: name.to_owned() }).collect();
        let edges = edges(manifest);
        let info = GraphInfo {
            node_count: nodes.len(),
            edge_count: edges.len(),
            is_realtime: false,
            checkpointer: true,
            checkpointer_type: checkpointer.to_owned(),
            publisher: false,
            store: false,
            interrupt_before: manifest.interrupt_before.clone(),
            interrupt_after: manifest.interrupt_after.clone(),
            context_type: "NoneType",
            id_generator: match manifest.ids {
                IdKind::String => "DefaultIDGenerator",
                IdKind::Integer => "IntIDGenerator",
                IdKind::Bigint => "BigIntIDGenerator",
            },
            id_type: manifest.ids.as_str(),
            state_type: manifest.state_type.clone(),
            state_fields: ENGINE_FIELDS
                .into_iter()
                .chain(manifest.fields.iter().map(|field| field.name.as_str()))
                .map(str::to_owned)
                .collect(),
        };
        Self { info, nodes, edges }
    }
}

fn edges(manifest: &Manifest) -> Vec<EdgeView> {
    let edge = |source: &str, target: &str| EdgeView {
        id: Uuid::new_v4(),
        source: source.to_owned(),
        target: target.to_owned(),
    };
    let views = manifest.edges.iter().flat_map(|spec| match (&spec.mapping, &spec.target) {
        (Some(mapping), _) => mapping.iter().map(|(_, target)| edge(&spec.source, target)).collect(),
        (None, Some(target)) => vec![edge(&spec.source, target)],
        (None, None) => vec![edge(&spec.source, "")],
    });
    views.collect()
}
