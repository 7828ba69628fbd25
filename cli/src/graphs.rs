//! `threadgate graph`: checks, registers and lists graphs; and the graphs that `dev` serves.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use threadgate_shared::config::StorageConfig;
use threadgate_shared::graph::Manifest;
use threadgate_shared::graph::declarative::{self, Checked, Finding};
use threadgate_shared::store::GraphRecord;

use crate::exit::{Exit, Failure};
use crate::print::{self, table};
use crate::storage;

/// The graph that `dev` serves where nobody names one.
const HELLO: &str = include_str!("../../examples/hello.yaml");

/// `threadgate graph`.
#[derive(Debug, Args)]
pub struct GraphArgs {
    #[command(subcommand)]
    command: GraphCommand,
}

#[derive(Debug, Subcommand)]
enum GraphCommand {
    /// Checks graphs of YAML or JSON: what is wrong, on which line, and how to mend it.
    Check(CheckArgs),
    /// Registers graphs, so that every worker runs them; the newest of a name gets the new runs.
    Push(PushArgs),
    /// Lists the graphs in the database, each in its newest version.
    List(ListArgs),
    /// Prints the JSON Schema of graphs, for editors.
    Schema,
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// Files, or folders of them.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Prints the findings as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct PushArgs {
    /// Files, or folders of them.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    storage: StorageConfig,
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    storage: StorageConfig,
    /// Prints the manifests as JSON.
    #[arg(long)]
    json: bool,
}

/// Works on graphs.
///
/// # Errors
/// [`Exit::Refused`] for graphs with mistakes; else why the database cannot be used.
pub async fn graph(args: GraphArgs) -> Result<(), Failure> {
    match args.command {
        GraphCommand::Check(args) => check(&args),
        GraphCommand::Push(args) => push(args).await,
        GraphCommand::List(args) => Ok(list(args).await?),
        GraphCommand::Schema => {
            print::line(format!("{:#}", declarative::json_schema()));
            Ok(())
        }
    }
}

fn check(args: &CheckArgs) -> Result<(), Failure> {
    let mut findings = Vec::new();
    let mut names = Vec::new();
    for (file, checked) in read(&args.paths)? {
        names.extend(
            checked.manifest.map(|manifest| format!("{}: graph '{}' is in order", file.display(), manifest.name)),
        );
        findings.extend(checked.findings);
    }
    if args.json {
        print::line(format!("{:#}", serde_json::to_value(&findings)?));
    } else {
        findings.iter().for_each(print::line);
        names.iter().for_each(print::line);
    }
    if findings.iter().any(Finding::is_error) { Err(Failure::told(Exit::Refused)) } else { Ok(()) }
}

async fn push(args: PushArgs) -> Result<(), Failure> {
    let records = load(&args.paths)?;
    args.storage.validate().map_err(anyhow::Error::msg)?;
    let store = storage::database(&args.storage).await?;
    store.check_schema().await?;
    store.register_graphs(&records).await?;
    for record in records {
        print::line(format!("Registered graph '{}' as {}.", record.name, record.version));
    }
    Ok(())
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
#[must_use]
pub(crate) fn hello() -> GraphRecord {
    let manifest = declarative::read("hello.yaml", HELLO).manifest;
    record(manifest.expect("the built-in graph is checked by a test"))
}

/// The graphs in `paths`, ready to be registered; findings go to standard error.
///
/// # Errors
/// [`Exit::Refused`] if one has a mistake.
pub(crate) fn load(paths: &[PathBuf]) -> Result<Vec<GraphRecord>, Failure> {
    let mut records = Vec::new();
    let mut wrong = 0;
    for (_, checked) in read(paths)? {
        for finding in &checked.findings {
            eprintln!("{finding}");
        }
        match checked.manifest {
            Some(manifest) => records.push(record(manifest)),
            None => wrong += 1,
        }
    }
    if wrong > 0 {
        return Err(Failure::new(Exit::Refused, format!("{wrong} of the graphs cannot be used; see above")));
    }
    Ok(records)
}

fn record(manifest: Manifest) -> GraphRecord {
    GraphRecord {
        name: manifest.name.clone(),
        version: manifest.version(None),
        manifest,
        registered_at: chrono::Utc::now(), // The store sets its own.
    }
}

fn read(paths: &[PathBuf]) -> Result<Vec<(PathBuf, Checked)>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(documents_in(path).with_context(|| format!("could not read the folder {}", path.display()))?);
        } else {
            files.push(path.clone());
        }
    }
    let read = |file: PathBuf| {
        let checked = declarative::read_file(&file)
            .unwrap_or_else(|_| Checked { manifest: None, findings: declarative::check(&file) });
        (file, checked)
    };
    Ok(files.into_iter().map(read).collect())
}

/// The graphs in a folder, by name: YAML and JSON, without schemas.
fn documents_in(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_document = [".yaml", ".yml", ".json"].iter().any(|ending| name.ends_with(ending));
        if is_document && !name.ends_with(".schema.json") && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_graph_is_in_order() {
        let checked = declarative::read("hello.yaml", HELLO);

        assert_eq!(checked.findings, []);
        assert_eq!(hello().name, "hello");
    }

    #[test]
    fn the_readmes_graph_is_in_order() {
        let readme = include_str!("../../README.md");
        let text = readme.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();

        assert_eq!(declarative::read("README.md", text).findings, []);
    }

    #[test]
    fn a_folder_gives_its_graphs_and_a_mistake_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("b.yaml"), HELLO).unwrap();
        std::fs::write(folder.path().join("graph.schema.json"), "{}").unwrap();
        std::fs::write(folder.path().join("notes.txt"), "no graph").unwrap();
        let names = |paths: &[PathBuf]| {
            let records = load(paths).map_err(|failure| failure.exit)?;
            Ok(records.into_iter().map(|record| record.name).collect::<Vec<_>>())
        };

        assert_eq!(names(&[folder.path().to_owned()]), Ok(vec!["hello".to_owned()]));

        std::fs::write(folder.path().join("a.yaml"), "name: broken\nnodes: {}\n").unwrap();
        assert_eq!(names(&[folder.path().to_owned()]), Err(Exit::Refused));
        assert_eq!(names(&[folder.path().join("missing.yaml")]), Err(Exit::Refused));
    }
}
