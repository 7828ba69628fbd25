//! Every failure case that must be a test is one: its id stands in the name or the documentation of
//! a test somewhere in the project.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The cases of the areas "durable", "approvals" and "api-input", which this release must survive.
const CASES: [(u32, u32); 2] = [(1, 42), (83, 90)];

/// Cases that need what a later release brings, and what that is.
const LATER: [(u32, &str); 1] =
    [(25, "a transaction pooler between the program and Postgres: with the support for Kubernetes")];

#[test]
fn every_failure_case_has_a_test_that_carries_its_id() {
    let found = ids_in_tests();

    let missing: Vec<String> = CASES
        .iter()
        .flat_map(|(first, last)| *first..=*last)
        .filter(|number| !LATER.iter().any(|(later, _)| later == number))
        .filter(|number| !found.contains(number))
        .map(|number| format!("C{number:02}"))
        .collect();

    assert!(missing.is_empty(), "no test carries {missing:?}");
}

#[test]
fn what_is_left_for_later_is_not_there_yet() {
    let found = ids_in_tests();

    let there: Vec<u32> = LATER.iter().map(|(number, _)| *number).filter(|number| found.contains(number)).collect();

    assert!(there.is_empty(), "{there:?} have tests now; take them off the list");
}

/// The ids in Rust files that hold tests, outside this file.
fn ids_in_tests() -> BTreeSet<u32> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are a folder of the project");
    let mut ids = BTreeSet::new();
    for folder in ["shared", "api", "worker", "scheduler", "cli", "tests"] {
        for file in rust_files(&root.join(folder)) {
            if file.ends_with("e2e/cases.rs") {
                continue;
            }
            let text = std::fs::read_to_string(&file).expect("a source file is text");
            if text.contains("#[test]") || text.contains("#[tokio::test") || text.contains("contract") {
                ids.extend(ids_in(&text));
            }
        }
    }
    ids
}

/// The numbers of `C07`, `c07_`, `C83:` in comments and names.
fn ids_in(text: &str) -> BTreeSet<u32> {
    let mut ids = BTreeSet::new();
    let bytes = text.as_bytes();
    for (at, _) in text.match_indices(['C', 'c']) {
        let word_before = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
        let Some(digits) = text.get(at + 1..at + 3).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
        else {
            continue;
        };
        let word_after = bytes.get(at + 3).is_some_and(u8::is_ascii_alphanumeric);
        if !word_before && !word_after {
            ids.insert(digits.parse().expect("two digits"));
        }
    }
    ids
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() && !path.ends_with("target") {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}
