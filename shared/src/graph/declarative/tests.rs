//! Documents that are right, documents that are wrong, and what the right ones do.

use std::path::PathBuf;

use serde_json::json;

use super::*;
use crate::graph::rehearsal::{Ended, Rehearsal};

/// Refuses `http` nodes, which need a worker.
struct NoHttp;

impl NodeFactory for NoHttp {
    fn http(&self, name: &str, _: HttpSpec) -> Result<Arc<dyn Node>, GraphError> {
        Err(GraphError { code: "GRAPH_000", message: format!("'{name}' needs a worker") })
    }
}

fn examples() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

fn graph(text: &str) -> Graph {
    let checked = read("test.yaml", text);
    let manifest = checked.manifest.unwrap_or_else(|| panic!("{:#?}", checked.findings));
    build(&manifest, &NoHttp).unwrap()
}

/// The findings of a document, each as `line:column severity message; fix`.
fn findings(text: &str) -> Vec<String> {
    let short = |finding: Finding| finding.to_string().trim_start_matches("test.yaml:").to_owned();
    read("test.yaml", text).findings.into_iter().map(short).collect()
}

/// A small right document with `replace` instead of `part`.
fn with(part: &str, replace: &str) -> String {
    const RIGHT: &str = "\
name: small
fields:
  topic: {default: none, schema: {type: string}}
entry: a
nodes:
  a:
    kind: set
    values:
      topic: user_text
  b:
    kind: scripted
    replies:
      - say: hi
edges:
  - from: a
    when: state.topic == 'x'
    to: b
  - from: b
    to: __end__
";
    assert!(part.is_empty() || RIGHT.contains(part), "{part}");
    RIGHT.replace(part, replace)
}

#[test]
fn the_examples_are_right_and_satisfy_the_published_schema() {
    let schema = jsonschema::validator_for(&json_schema()).unwrap();
    let mut count = 0;

    for entry in std::fs::read_dir(examples()).unwrap() {
        let path = entry.unwrap().path();
        if !matches!(path.extension().and_then(|end| end.to_str()), Some("yaml" | "json"))
            || path.ends_with("graph.schema.json")
        {
            continue;
        }
        let checked = read_file(&path).unwrap();
        let (source, _) = Source::read(&std::fs::read_to_string(&path).unwrap());

        assert_eq!(checked.findings, [], "{}", path.display());
        assert!(checked.manifest.is_some());
        let errors: Vec<String> = schema.iter_errors(&source.json).map(|error| error.to_string()).collect();
        assert_eq!(errors, Vec::<String>::new(), "{}", path.display());
        count += 1;
    }
    assert!(count >= 1);
}

/// Writes the schema with `UPDATE_SCHEMA=1`.
#[test]
fn the_published_schema_is_the_one_of_the_types() {
    let path = examples().join("graph.schema.json");
    let current = serde_json::to_string_pretty(&json_schema()).unwrap() + "\n";
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&path, &current).unwrap();
    }

    let published = std::fs::read_to_string(&path).unwrap();

    assert_eq!(published, current, "run this test with UPDATE_SCHEMA=1 and commit examples/graph.schema.json");
}
