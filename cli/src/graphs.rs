//! `threadgate graph`: what graphs are there; and the graph that `dev` serves where nobody names one.

use anyhow::Result;
use clap::{Args, Subcommand};
use threadgate_shared::config::StorageConfig;
use threadgate_shared::graph::{Graph, GraphError, NodeContext};
use threadgate_shared::store::GraphRecord;

use crate::exit::Failure;
use crate::print::{self, table};
use crate::storage;

/// `threadgate graph`.
#[derive(Debug, Args)]
pub struct GraphArgs {
    #[command(subcommand)]
    command: GraphCommand,
}

#[derive(Debug, Subcommand)]
enum GraphCommand {
    /// Lists the graphs in the database, each in its newest version.
    List(ListArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    storage: StorageConfig,
    /// Prints the manifests, as JSON.
    #[arg(long)]
    json: bool,
}

/// Works on graphs.
///
/// # Errors
/// If the database cannot be used.
pub async fn graph(args: GraphArgs) -> Result<(), Failure> {
    match args.command {
        GraphCommand::List(args) => Ok(list(args).await?),
    }
}

async fn list(args: ListArgs) -> Result<()> {
    args.storage.validate().map_err(anyhow::Error::msg)?;
    let store = storage::database(&args.storage).await?;
    store.check_schema().await?;
    let graphs = store.graphs().await?;
    if args.json {
        let manifests: Result<Vec<_>, _> = graphs.iter().map(|graph| serde_json::to_value(&graph.manifest)).collect();
        print::line(format!("{:#}", serde_json::Value::Array(manifests?)));
        return Ok(());
    }
    let cells = |graph: &GraphRecord| {
        let nodes = graph.manifest.nodes.len().to_string();
        vec![graph.name.clone(), graph.version.to_string(), nodes, graph.registered_at.to_rfc3339()]
    };
    let rows: Vec<Vec<String>> = graphs.iter().map(cells).collect();
    print::line(table(&["GRAPH", "VERSION", "NODES", "REGISTERED"], &rows));
    Ok(())
}

/// The graph that `dev` serves where nobody names one.
pub(crate) fn hello() -> Result<Graph, GraphError> {
    Graph::builder("hello").node("greet", greet).entry("greet").build()
}

async fn greet(ctx: NodeContext) -> String {
    let said = ctx.state.last_message().map(|message| message.plain_text()).unwrap_or_default();
    format!("Hello! You said: {said}")
}
