//! The project's own rules, as far as a machine can see them.

use std::path::{Path, PathBuf};

/// Lines of code in one file; more are several things in one.
const CODE_LINES_MAX: usize = 500;

/// One text file of the project.
struct File {
    /// From the root, with `/`.
    path: String,
    text: String,
}

impl File {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn is_in(&self, folder: &str) -> bool {
        self.path.starts_with(folder)
    }

    /// The lines that are neither blank nor comment, with their numbers.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
        lines.filter(|(_, line)| !line.is_empty() && !line.starts_with("//"))
    }

    /// Where the code says one of `words`, as `path:line`.
    fn says(&self, words: &[&str]) -> Vec<String> {
        let found = self.code().filter(|(_, line)| words.iter().any(|word| line.contains(word)));
        found.map(|(number, _)| format!("{}:{number}", self.path)).collect()
    }
}

#[test]
fn every_file_says_what_it_is_for() {
    let silent = rust_files().filter(|file| !file.text.starts_with("//!"));

    assert_none("files without a module comment", silent.map(|file| file.path));
}

#[test]
fn sql_is_at_home_in_the_store() {
    let words = ["sqlx::query", "sqlx::raw_sql", "QueryBuilder::new"];
    // Tests look into the tables.
    let elsewhere = rust_files().filter(|file| !file.is_in("shared/src/store/") && !file.is_in("tests/"));

    assert_none("SQL outside shared/src/store", elsewhere.flat_map(|file| file.says(&words)));
}

#[test]
fn the_queue_engine_is_known_to_the_queue_alone() {
    let outside = || rust_files().filter(|file| !file.is_in("shared/src/queue/") && !file.is_in("tests/e2e/tidy.rs"));
    let streams = ["XREADGROUP", "XACK", "XAUTOCLAIM", "XCLAIM"];

    assert_none("apalis outside shared/src/queue", outside().flat_map(|file| file.says(&["apalis"])));
    assert_none("consumer groups outside shared/src/queue", outside().flat_map(|file| file.says(&streams)));
}

#[test]
fn routes_enter_only_through_the_table_that_asks_who_may_call_them() {
    let api = rust_files().filter(|file| file.is_in("api/src/") && !file.is_in("api/src/testing/"));
    let elsewhere = api.filter(|file| !["api/src/routing.rs", "api/src/routes/docs.rs"].contains(&file.path.as_str()));

    let found = elsewhere.flat_map(|file| file.says(&[".route(", ".routes(", ".nest(", "_service("]));
    assert_none("routes without a scope", found);
}

#[test]
fn no_file_does_too_much() {
    let long = rust_files().filter(|file| file.code().count() > CODE_LINES_MAX);

    assert_none("files of more than 500 lines of code", long.map(|file| file.path));
}

#[test]
fn roles_do_not_know_each_other() {
    let roles = ["api", "worker", "scheduler"];
    let mut known = Vec::new();
    for role in roles {
        let manifest = std::fs::read_to_string(root().join(role).join("Cargo.toml")).unwrap();
        let dependencies = manifest.split("[dev-dependencies]").next().unwrap();
        let others = roles.iter().filter(|other| **other != role);
        known.extend(
            others
                .filter(|other| dependencies.contains(&format!("threadgate-{other}")))
                .map(|o| format!("{role} knows {o}")),
        );
    }

    assert_none("roles that know each other", known);
}

#[test]
fn nothing_is_promised_or_left_out() {
    let words = ["#[ignore", "todo!(", "unimplemented!(", "thread::sleep"];
    let remarks = [concat!("for ", "now"), concat!("TO", "DO"), concat!("FIX", "ME"), concat!("HA", "CK")];
    let own = |file: &File| file.is_in("tests/e2e/tidy.rs");

    let promised = rust_files().filter(|file| !own(file)).flat_map(|file| file.says(&words));
    assert_none("tests or code left out", promised);
    let comments = rust_files().filter(|file| !own(file)).flat_map(|file| {
        let lines = file.text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("//"));
        let found = lines.filter(|(_, line)| remarks.iter().any(|remark| line.contains(remark)));
        found.map(|(at, _)| format!("{}:{}", file.path, at + 1)).collect::<Vec<_>>()
    });
    assert_none("remarks about another day", comments);
}

#[test]
fn no_machine_is_named() {
    let places = [concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/wo", "rk/"), concat!("/tm", "p/h/")];
    let named = files().into_iter().filter(|file| !file.is_in("Cargo.lock"));

    let found = named.filter(|file| places.iter().any(|place| file.text.contains(place)));
    assert_none("files that name a machine's folders", found.map(|file| file.path));
}

fn assert_none(what: &str, found: impl IntoIterator<Item = String>) {
    let found: Vec<String> = found.into_iter().collect();
    assert!(found.is_empty(), "{what}:\n  {}", found.join("\n  "));
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn rust_files() -> impl Iterator<Item = File> {
    files().into_iter().filter(File::is_rust)
}

/// Every text file of the project, not what is built or recorded.
fn files() -> Vec<File> {
    let mut files = Vec::new();
    collect(&root(), &mut files);
    assert!(files.iter().filter(|file| file.is_rust()).count() > 50, "the project was not found");
    files
}

fn collect(folder: &Path, files: &mut Vec<File>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let is_made_elsewhere = name == "target" || path.ends_with("tests/golden") || path.ends_with("tests/vectors");
        if is_made_elsewhere || (name.starts_with('.') && name != ".ci") {
            continue;
        }
        if path.is_dir() {
            collect(&path, files);
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            let path = path.strip_prefix(root()).unwrap().to_str().unwrap().replace('\\', "/");
            files.push(File { path, text });
        }
    }
}
