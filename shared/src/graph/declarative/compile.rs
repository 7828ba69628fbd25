//! From a document that has the right shape to a manifest: what the schema cannot say is checked here.

use serde::de::DeserializeOwned;

use super::approval::ApprovalSpec;
use super::document::{Document, EdgeDoc, NodeCommon, NodeDoc};
use super::finding::{Finding, Place};
use super::http::HttpSpec;
use super::schema::dotted;
use super::scripted::ScriptedSpec;
use super::set::SetSpec;
use super::source::{Source, step};
use super::template::Template;
use super::tools::ToolsDoc;
use crate::domain::state::ENGINE_FIELDS;
use crate::domain::{Json, JsonMap, PoolName};
use crate::graph::builder::{About, Problem, problems, unreachable_nodes};
use crate::graph::expression::{Expression, ExpressionError, Place as In, suggestion};
use crate::graph::reply::message_of;
use crate::graph::{END, EdgeSpec, FieldSpec, Manifest, NodePolicy, NodeSpec, RetryPolicy, START};

/// The keys that every kind of node has.
const COMMON_KEYS: [&str; 5] = ["kind", "description", "pool", "timeout", "retry"];

/// The manifest of the document, and what is wrong with it.
pub(super) fn compile(source: &Source) -> (Option<Manifest>, Vec<Finding>) {
    let document = match typed::<Document>(&source.json) {
        Ok(document) => document,
        Err(why) => return (None, vec![Finding::error(Place::START, why, "see the graph's schema")]),
    };
    let mut compiler = Compiler::new(source, &document);
    let nodes = document.nodes.0.iter().map(|(name, node)| compiler.node(name, node)).collect();
    let edges = compiler.edges(&document);
    for (list, names) in
        [("interrupt_before", &document.interrupt_before), ("interrupt_after", &document.interrupt_after)]
    {
        for (index, name) in names.iter().enumerate() {
            compiler.node_name(&format!("/{list}/{index}"), name, false);
        }
    }
    let field = |(name, field): &(String, super::document::FieldDoc)| FieldSpec {
        name: name.clone(),
        default: field.default.clone(),
        reducer: field.reducer,
        schema: field.schema.clone(),
    };
    let manifest = Manifest {
        name: document.name.clone(),
        code: false,
        nodes,
        edges,
        interrupt_before: document.interrupt_before.clone(),
        interrupt_after: document.interrupt_after.clone(),
        fields: document.fields.0.iter().map(field).collect(),
        state_type: document.state_type.clone().unwrap_or_else(|| "AgentState".to_owned()),
        ids: document.ids,
        thread_name: document.thread_name.clone(),
    };
    compiler.whole(&manifest);
    let findings = compiler.findings;
    let is_sound = !findings.iter().any(Finding::is_error);
    (is_sound.then_some(manifest), findings)
}

fn typed<T: DeserializeOwned>(value: &Json) -> Result<T, String> {
    serde_json::from_value(value.clone()).map_err(|error| format!("the graph cannot be read: {error}"))
}

struct Compiler<'a> {
    source: &'a Source,
    fields: Vec<String>,
    nodes: Vec<String>,
    /// Where each edge of the manifest came from.
    edge_pointers: Vec<String>,
    /// Jumps that scripted nodes make, as edges.
    jumps: Vec<EdgeSpec>,
    /// Whether some node may jump anywhere.
    jumps_anywhere: bool,
    findings: Vec<Finding>,
}

impl<'a> Compiler<'a> {
    fn new(source: &'a Source, document: &Document) -> Self {
        Self {
            source,
            fields: document.fields.0.iter().map(|(name, _)| name.clone()).collect(),
            nodes: document.nodes.0.iter().map(|(name, _)| name.clone()).collect(),
            edge_pointers: Vec::new(),
            jumps: Vec::new(),
            jumps_anywhere: false,
            findings: Vec::new(),
        }
    }

    fn wrong(&mut self, pointer: &str, message: impl Into<String>, fix: impl Into<String>) {
        self.findings.push(Finding::error(self.source.place(pointer), message, fix));
    }

    /// Adds a message of the form `what; do this`.
    fn wrong_at(&mut self, place: Place, message: &str) {
        let (what, fix) = message.rsplit_once("; ").unwrap_or((message, "correct it"));
        self.findings.push(Finding::error(place, what, fix));
    }

    fn wrong_expression(&mut self, pointer: &str, error: ExpressionError) {
        let place = self.source.inside(pointer, error.at);
        let message = match error.at {
            Some((line, column)) => format!("{}: {} (at {line}:{column} inside it)", dotted(pointer), error.message),
            None => format!("{}: {}", dotted(pointer), error.message),
        };
        self.findings.push(Finding::error(place, message, error.fix));
    }

    fn expression(&mut self, pointer: &str, text: &str, place: In) {
        if let Err(error) = Expression::compile(text, place, Some(&self.fields)) {
            self.wrong_expression(pointer, error);
        }
    }

    fn template(&mut self, pointer: &str, text: &str) {
        if let Err(error) = Template::compile(text, Some(&self.fields)) {
            self.wrong_expression(pointer, error);
        }
    }

    /// Checks that `name` is a node, or (as a target) one of the engine's places.
    fn node_name(&mut self, pointer: &str, name: &str, is_target: bool) {
        let is_place = is_target && (name == START || name == END);
        if is_place || self.nodes.iter().any(|node| node == name) {
            return;
        }
        let places = [END].into_iter().filter(|_| is_target);
        let fix = match name {
            "end" | "END" | "__END__" if is_target => format!("did you mean '{END}'?"),
            "start" | "START" | "__START__" if is_target => format!("did you mean '{START}'?"),
            name => suggestion(name, self.nodes.iter().map(String::as_str).chain(places)),
        };
        self.wrong(pointer, format!("{} is '{name}', which is not a node", dotted(pointer)), fix);
    }

    fn field_name(&mut self, pointer: &str, name: &str) {
        if name == "context_summary" || self.fields.iter().any(|field| field == name) {
            return;
        }
        let place = self.source.key_place(pointer);
        let (message, fix) = if ENGINE_FIELDS.contains(&name) {
            (format!("'{name}' belongs to the engine"), "write a field of the graph".to_owned())
        } else if self.fields.is_empty() {
            (format!("the graph has no field '{name}'"), format!("declare it: 'fields: {{{name}: {{}}}}'"))
        } else {
            let fix = suggestion(name, self.fields.iter().map(String::as_str));
            (format!("the graph has no field '{name}'"), format!("{fix} or declare it under 'fields'"))
        };
        self.findings.push(Finding::error(place, message, fix));
    }

    fn node(&mut self, name: &str, node: &NodeDoc) -> NodeSpec {
        let pointer = format!("/nodes/{}", step(name));
        let is_common = |key: &str| COMMON_KEYS.contains(&key);
        let (common, spec): (JsonMap, JsonMap) = node.0.clone().into_iter().partition(|(key, _)| is_common(key));
        let spec = Json::Object(spec);
        let common: Option<NodeCommon> = self.part(&pointer, &Json::Object(common));
        let kind = common.as_ref().map(|common| common.kind.clone()).unwrap_or_default();
        let mut spec = spec;
        match kind.as_str() {
            "tools" => spec = self.tools(&pointer, name, spec),
            "approval" => self.approval(&pointer, name, &spec),
            "http" => self.http(&pointer, &spec),
            "set" => self.set(&pointer, &spec),
            _ => self.scripted(&pointer, name, &spec),
        }
        let policy = common.map_or_else(NodePolicy::default, |common| policy_of(&common));
        NodeSpec { name: name.to_owned(), kind, spec, policy }
    }

    fn part<T: DeserializeOwned>(&mut self, pointer: &str, value: &Json) -> Option<T> {
        match serde_json::from_value(value.clone()) {
            Ok(part) => Some(part),
            Err(error) => {
                self.wrong(pointer, format!("{} cannot be read: {error}", dotted(pointer)), "see the graph's schema");
                None
            }
        }
    }

    /// The manifest's form of a `tools` node, which introspection and admission read.
    fn tools(&mut self, pointer: &str, node: &str, doc: Json) -> Json {
        let Some(doc) = self.part::<ToolsDoc>(pointer, &doc) else { return doc };
        let (spec, wrong) = doc.into_spec();
        for (index, message) in wrong {
            self.wrong_at(self.source.place(&format!("{pointer}/tools/{index}")), &message);
        }
        for (index, tool) in spec.tools.iter().enumerate() {
            let Some(target) = &tool.handoff else { continue };
            self.node_name(&format!("{pointer}/tools/{index}/handoff"), target, true);
            self.jumps.push(edge(node, Some(target.clone())));
        }
        serde_json::to_value(spec).expect("a spec has string keys")
    }

    fn approval(&mut self, pointer: &str, node: &str, spec: &Json) {
        let Some(spec) = self.part::<ApprovalSpec>(pointer, spec) else { return };
        self.template(&format!("{pointer}/message"), &spec.message);
        for (name, target) in [("approved", &spec.approved), ("denied", &spec.denied)] {
            let Some(target) = target else { continue };
            self.node_name(&format!("{pointer}/{name}"), target, true);
            self.jumps.push(edge(node, Some(target.clone())));
        }
        if let Some(field) = &spec.field {
            let place = format!("{pointer}/field");
            if !self.fields.contains(field) {
                let fix = suggestion(field, self.fields.iter().map(String::as_str));
                self.wrong(
                    &place,
                    format!("the graph has no field '{field}'"),
                    format!("{fix} or declare it under 'fields'"),
                );
            }
        }
    }

    fn http(&mut self, pointer: &str, spec: &Json) {
        self.jumps_anywhere = true;
        let Some(spec) = self.part::<HttpSpec>(pointer, spec) else { return };
        for (inner, message) in spec.problems() {
            self.wrong_at(self.source.place(&format!("{pointer}{inner}")), &message);
        }
    }

    fn set(&mut self, pointer: &str, spec: &Json) {
        let Some(spec) = self.part::<SetSpec>(pointer, spec) else { return };
        for (field, value) in &spec.values.0 {
            let pointer = format!("{pointer}/values/{}", step(field));
            self.field_name(&pointer, field);
            if let Json::String(text) = value {
                self.expression(&pointer, text, In::Node);
            }
        }
        if let Some(say) = &spec.say {
            self.template(&format!("{pointer}/say"), say);
        }
        if let Some(goto) = &spec.goto {
            self.jumps_anywhere = true;
            self.expression(&format!("{pointer}/goto"), goto, In::Node);
        }
    }

    fn scripted(&mut self, pointer: &str, node: &str, spec: &Json) {
        let Some(spec) = self.part::<ScriptedSpec>(pointer, spec) else { return };
        for (index, reply) in spec.replies.iter().enumerate() {
            let pointer = format!("{pointer}/replies/{index}");
            if let Some(when) = &reply.when {
                self.expression(&format!("{pointer}/when"), when, In::Node);
            } else if index + 1 < spec.replies.len() {
                let place = self.source.place(&pointer);
                let message = format!("{} always holds, so the replies after it are never given", dotted(&pointer));
                self.findings.push(Finding::warning(place, message, "give it a 'when', or put it last"));
            }
            if let Some(say) = &reply.say {
                self.template(&format!("{pointer}/say"), say);
            }
            for (index, message) in reply.messages.iter().enumerate() {
                if let Err(why) = message_of(index, message, crate::graph::IdKind::String) {
                    self.wrong(&format!("{pointer}/messages/{index}"), why, "write text, or a message as on the wire");
                }
            }
            for field in reply.fields.keys() {
                self.field_name(&format!("{pointer}/fields/{}", step(field)), field);
            }
            if let Some(goto) = &reply.goto {
                self.node_name(&format!("{pointer}/goto"), goto, true);
                self.jumps.push(edge(node, Some(goto.clone())));
            }
            let schema = reply.interrupt.as_ref().map(|question| &question.response_schema).filter(|s| !s.is_null());
            if let Some(Err(error)) = schema.map(jsonschema::validator_for) {
                let pointer = format!("{pointer}/interrupt/response_schema");
                self.wrong(&pointer, format!("this is no JSON Schema: {error}"), "correct it");
            }
        }
    }

    fn edges(&mut self, document: &Document) -> Vec<EdgeSpec> {
        let mut edges = Vec::new();
        if let Some(entry) = &document.entry {
            self.node_name("/entry", entry, false);
            self.edge_pointers.push("/entry".to_owned());
            edges.push(edge(START, Some(entry.clone())));
        }
        for (index, doc) in document.edges.iter().enumerate() {
            let pointer = format!("/edges/{index}");
            self.edge(&pointer, doc);
            let mut made = Vec::new();
            if let Some(when) = &doc.when {
                let mapping = doc.to.iter().map(|to| (true.into(), to.clone())).collect();
                made.push(conditional(doc, when, Some(mapping)));
            } else if let Some(switch) = &doc.switch {
                let case = |(value, target): &(String, String)| (value.as_str().into(), target.clone());
                made.push(conditional(doc, switch, Some(doc.cases.0.iter().map(case).collect())));
            } else if let Some(route) = &doc.route {
                made.push(conditional(doc, route, None));
            } else if doc.to.is_some() {
                made.push(edge(&doc.from, doc.to.clone()));
            }
            made.extend(doc.otherwise.iter().map(|target| edge(&doc.from, Some(target.clone()))));
            self.edge_pointers.extend(made.iter().map(|_| pointer.clone()));
            edges.extend(made);
        }
        edges
    }

    fn edge(&mut self, pointer: &str, doc: &EdgeDoc) {
        if doc.from == END {
            self.wrong(&format!("{pointer}/from"), format!("an edge begins at {END}, where a run ends"), "remove it");
        } else {
            self.node_name(&format!("{pointer}/from"), &doc.from, doc.from == START);
        }
        for (key, target) in [("to", &doc.to), ("else", &doc.otherwise)] {
            if let Some(target) = target {
                self.node_name(&format!("{pointer}/{key}"), target, true);
            }
        }
        for (value, target) in &doc.cases.0 {
            self.node_name(&format!("{pointer}/cases/{}", step(value)), target, true);
        }
        for (key, text) in [("when", &doc.when), ("switch", &doc.switch), ("route", &doc.route)] {
            if let Some(text) = text {
                self.expression(&format!("{pointer}/{key}"), text, In::Edge);
            }
        }
        let (to, when, switch, route) =
            (doc.to.is_some(), doc.when.is_some(), doc.switch.is_some(), doc.route.is_some());
        let cases = !doc.cases.0.is_empty();
        let is_one = matches!(
            (to, when, switch, cases, route),
            (true, _, false, false, false) | (false, false, true, true, false) | (false, false, false, false, true)
        );
        if !is_one {
            let fix = "write 'to' alone, 'when' with 'to', 'switch' with 'cases', or 'route'";
            self.wrong(pointer, format!("the edge from '{}' does not say clearly where it leads", doc.from), fix);
        } else if doc.otherwise.is_some() && !(when || switch || route) {
            self.wrong(&format!("{pointer}/else"), "'else' needs a condition", "remove it, or add 'when'");
        }
    }

    /// What concerns the graph as a whole; unknown names were found before, with their places.
    fn whole(&mut self, manifest: &Manifest) {
        // Targets that are no nodes have been found with their own places.
        let is_new = |problem: &Problem| !matches!(problem.error.code, "GRAPH_004" | "GRAPH_007");
        for problem in problems(manifest).into_iter().filter(is_new) {
            let pointer = match problem.about {
                About::Name => "/name".to_owned(),
                About::Entry if manifest.nodes.is_empty() => "/nodes".to_owned(),
                About::Entry => String::new(),
                About::Node(index) => format!("/nodes/{}", step(&manifest.nodes[index].name)),
                About::Edge(index) => self.edge_pointers[index].clone(),
                About::Field(index) => format!("/fields/{}", step(&manifest.fields[index].name)),
                About::InterruptBefore(index) => format!("/interrupt_before/{index}"),
                About::InterruptAfter(index) => format!("/interrupt_after/{index}"),
            };
            let place = self.source.key_place(&pointer);
            let message = match problem.about {
                About::Entry => "the graph has no entry point; add 'entry: ' and the first node's name".to_owned(),
                _ => problem.error.message,
            };
            self.wrong_at(place, &message);
        }
        self.doubled_edges(manifest);
        self.unreachable(manifest);
    }

    fn doubled_edges(&mut self, manifest: &Manifest) {
        let mut seen = std::collections::HashSet::new();
        for (index, edge) in manifest.edges.iter().enumerate().filter(|(_, edge)| edge.condition.is_none()) {
            if !seen.insert(&edge.source) {
                let place = self.source.place(&self.edge_pointers[index]);
                let message =
                    format!("'{}' has an edge without condition already, so this one is never followed", edge.source);
                self.findings.push(Finding::warning(place, message, "give it a 'when' and put it first, or remove it"));
            }
        }
    }

    fn unreachable(&mut self, manifest: &Manifest) {
        if self.jumps_anywhere || self.findings.iter().any(Finding::is_error) {
            return;
        }
        let mut manifest = manifest.clone();
        manifest.edges.append(&mut self.jumps);
        for index in unreachable_nodes(&manifest) {
            let name = &manifest.nodes[index].name;
            let place = self.source.key_place(&format!("/nodes/{}", step(name)));
            let message = format!("no run can reach node '{name}'");
            self.findings.push(Finding::warning(place, message, "add an edge that leads to it, or remove it"));
        }
    }
}

fn edge(source: &str, target: Option<String>) -> EdgeSpec {
    EdgeSpec { source: source.to_owned(), target, condition: None, mapping: None }
}

fn conditional(doc: &EdgeDoc, condition: &str, mapping: Option<Vec<(Json, String)>>) -> EdgeSpec {
    EdgeSpec { source: doc.from.clone(), target: None, condition: Some(condition.to_owned()), mapping }
}

fn policy_of(common: &NodeCommon) -> NodePolicy {
    let (retry, normal) = (&common.retry, RetryPolicy::default());
    NodePolicy {
        pool: common.pool.clone().map_or_else(PoolName::default_pool, PoolName),
        timeout_ms: common.timeout.map(super::document::Span::millis),
        retry: RetryPolicy {
            attempts: retry.attempts.unwrap_or(normal.attempts),
            delay_min_ms: retry.delay_min.map_or(normal.delay_min_ms, super::document::Span::millis),
            delay_max_ms: retry.delay_max.map_or(normal.delay_max_ms, super::document::Span::millis),
            retry_on: retry.retry_on.clone(),
        },
    }
}
