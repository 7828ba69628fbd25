//! Graphs as documents: YAML or JSON, checked with places and fixes, turned into a manifest, and from
//! a manifest into something that runs.

mod approval;
mod compile;
mod document;
mod finding;
mod http;
mod schema;
mod scripted;
mod set;
mod source;
mod template;
mod tools;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

pub use approval::{APPROVAL, ApprovalSpec};
pub use document::{Document, EdgeDoc, FieldDoc, NodeCommon, NodeDoc, Ordered, RetryDoc, Span};
pub use finding::{Finding, Place, Severity};
pub use http::{HttpMessages, HttpMethod, HttpSpec};
pub use schema::{KINDS, published as json_schema};
pub use scripted::{FailureSpec, QuestionSpec, ReplySpec, ScriptedNode, ScriptedSpec};
pub use set::{SetNode, SetSpec};
pub use source::DOCUMENT_BYTES_MAX;
pub use template::Template;
pub use tools::{GuardDoc, HttpToolSpec, OnExpiry, ToolDoc, ToolRun, ToolsDoc};

use super::builder::TOOLS;
use super::expression::{Expression, ExpressionError, Facts, Place as In};
use super::{Condition, EdgeSpec, Graph, GraphError, IdKind, Manifest, Node, NodeSpec, Tool, ToolSet};
use crate::domain::{Json, ToolsSpec};
use approval::ApprovalNode;
use source::Source;
use tools::CannedTool;

/// Makes the nodes whose code is not here: what does I/O belongs to the worker.
pub trait NodeFactory: Send + Sync {
    /// The `http` node called `name`; messages of its replies without an id get one of `ids`.
    ///
    /// # Errors
    /// `GRAPH_000` if this program cannot run it, for instance without the secret it names.
    fn http(&self, name: &str, ids: IdKind, spec: HttpSpec) -> Result<Arc<dyn Node>, GraphError>;

    /// The tool called `name` behind HTTP.
    ///
    /// # Errors
    /// The same.
    fn tool(&self, name: &str, spec: HttpToolSpec) -> Result<Arc<dyn Tool>, GraphError>;
}

/// What reading a document gave.
#[derive(Debug, Clone, PartialEq)]
pub struct Checked {
    /// The manifest, unless a finding is an error.
    pub manifest: Option<Manifest>,
    /// What is wrong, in the order of the file.
    pub findings: Vec<Finding>,
}

/// Reads a document; `file` is the name its findings carry.
#[must_use]
pub fn read(file: &str, text: &str) -> Checked {
    let (source, mut findings) = Source::read(text);
    let mut manifest = None;
    if !findings.iter().any(Finding::is_error) {
        findings.extend(schema::validate(&source));
    }
    if !findings.iter().any(Finding::is_error) {
        let (compiled, found) = compile::compile(&source);
        manifest = compiled;
        findings.extend(found);
    }
    findings.sort_by_key(|finding| (finding.line, finding.column));
    findings.dedup();
    for finding in &mut findings {
        file.clone_into(&mut finding.file);
    }
    Checked { manifest, findings }
}

/// Reads the document at `path`.
///
/// # Errors
/// The file could not be read.
pub fn read_file(path: &Path) -> std::io::Result<Checked> {
    let text = std::fs::read_to_string(path)?;
    Ok(read(&path.display().to_string(), &text))
}

/// What is wrong with the document at `path`; a file that cannot be read is a finding too.
#[must_use]
pub fn check(path: &Path) -> Vec<Finding> {
    match read_file(path) {
        Ok(checked) => checked.findings,
        Err(error) => {
            let mut finding =
                Finding::error(Place::START, format!("the file cannot be read: {error}"), "check the path");
            finding.file = path.display().to_string();
            vec![finding]
        }
    }
}

/// The graph of a declarative manifest; `factory` makes the nodes that do I/O.
///
/// # Errors
/// `GRAPH_000` for a kind this program does not know, or a spec or expression it cannot read.
pub fn build(manifest: &Manifest, factory: &dyn NodeFactory) -> Result<Graph, GraphError> {
    let (mut nodes, mut tools) = (HashMap::new(), HashMap::new());
    for spec in &manifest.nodes {
        if spec.kind == TOOLS {
            tools.insert(spec.name.clone(), Arc::new(tool_set(manifest, spec, factory)?));
            continue;
        }
        nodes.insert(spec.name.clone(), node(manifest, spec, factory)?);
    }
    let mut conditions = HashMap::new();
    for (index, edge) in manifest.edges.iter().enumerate() {
        if let Some(text) = &edge.condition {
            conditions.insert(index, condition(edge, text)?);
        }
    }
    Ok(Graph { manifest: Arc::new(manifest.clone()), version: manifest.version(None), nodes, tools, conditions })
}

fn unreadable(manifest: &Manifest, node: &str, why: &str) -> GraphError {
    let message = format!("node '{node}' of graph '{}': {why}; check the graph and push it anew", manifest.name);
    GraphError { code: "GRAPH_000", message }
}

fn tool_set(manifest: &Manifest, node: &NodeSpec, factory: &dyn NodeFactory) -> Result<ToolSet, GraphError> {
    let wrong = |why: String| unreadable(manifest, &node.name, &why);
    let spec: ToolsSpec = parsed(&node.spec).map_err(wrong)?;
    let mut set = ToolSet::new().guard(spec.guard).concurrency(spec.concurrency);
    for tool in spec.tools {
        set = match parsed::<Option<ToolRun>>(&tool.run).map_err(wrong)? {
            Some(ToolRun::Returns(output)) => set.tool(tool, CannedTool(output)),
            Some(ToolRun::Http(http)) => {
                let code = factory.tool(&tool.name, http)?;
                set.shared(tool, code)
            }
            None => set.declared(tool),
        };
    }
    Ok(set)
}

fn node(manifest: &Manifest, spec: &NodeSpec, factory: &dyn NodeFactory) -> Result<Arc<dyn Node>, GraphError> {
    let unreadable = |why: String| unreadable(manifest, &spec.name, &why);
    let expression = |(place, error): (String, ExpressionError)| unreadable(format!("{place}: {}", error.message));
    match spec.kind.as_str() {
        "http" => factory.http(&spec.name, manifest.ids, parsed(&spec.spec).map_err(unreadable)?),
        "approval" => {
            let node = ApprovalNode::new(parsed(&spec.spec).map_err(unreadable)?);
            Ok(Arc::new(node.map_err(expression)?))
        }
        "set" => {
            let node = SetNode::new(&parsed(&spec.spec).map_err(unreadable)?, manifest.ids);
            Ok(Arc::new(node.map_err(expression)?))
        }
        "scripted" => {
            let node = ScriptedNode::new(parsed(&spec.spec).map_err(unreadable)?, manifest.ids);
            Ok(Arc::new(node.map_err(expression)?))
        }
        kind => Err(unreadable(format!("this program does not know nodes of kind '{kind}'"))),
    }
}

fn parsed<T: serde::de::DeserializeOwned>(spec: &Json) -> Result<T, String> {
    serde_json::from_value(spec.clone()).map_err(|error| error.to_string())
}

/// The condition of an edge. With a mapping whose keys are text, the value is compared as text;
/// with true and false as keys it must be one of them.
fn condition(edge: &EdgeSpec, text: &str) -> Result<Condition, GraphError> {
    let expression = Expression::compile(text, In::Edge, None).map_err(|error| GraphError {
        code: "GRAPH_000",
        message: format!(
            "the condition on the edge from '{}': {}; check the graph and push it anew",
            edge.source, error.message
        ),
    })?;
    let keys: Vec<&Json> = edge.mapping.iter().flatten().map(|(key, _)| key).collect();
    let wants_bool = !keys.is_empty() && keys.iter().all(|key| key.is_boolean());
    let wants_text = !keys.is_empty() && keys.iter().all(|key| key.is_string());
    Ok(Arc::new(move |state| {
        let value = expression.evaluate(&Facts { state, node: None })?;
        if wants_bool && !value.is_boolean() {
            return Err(format!("it must be true or false, not {value}"));
        }
        Ok(if wants_text && !value.is_string() { value.to_string().into() } else { value })
    }))
}

#[cfg(test)]
mod running_tests;
#[cfg(test)]
mod tests;
