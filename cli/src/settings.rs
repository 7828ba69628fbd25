//! The README's table of settings, made from the flags themselves so that it is never stale.

use std::collections::BTreeMap;
use std::path::Path;

use clap::{Arg, CommandFactory};

use crate::args::Program;

const BEGIN: &str =
    "<!-- settings: begin (made from the flags; `UPDATE_README=1 cargo test -p threadgate` rewrites it) -->\n";
const END: &str = "<!-- settings: end -->\n";
const ROLES: [&str; 3] = ["api", "worker", "scheduler"];

struct Setting {
    default: String,
    meaning: String,
    roles: Vec<&'static str>,
}

/// All settings of the roles, those of all roles first, then role by role.
fn table() -> String {
    let program = Program::command();
    let mut settings: Vec<(String, Setting)> = Vec::new();
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for role in ROLES {
        let command = program.find_subcommand(role).expect("the roles are subcommands");
        for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
            let (Some(flag), Some(_)) = (argument.get_long(), argument.get_env()) else { continue };
            let place = *places.entry(flag.to_owned()).or_insert_with(|| {
                settings.push((
                    name(argument),
                    Setting { default: default(argument), meaning: meaning(argument), roles: Vec::new() },
                ));
                settings.len() - 1
            });
            settings[place].1.roles.push(role);
        }
    }
    settings.sort_by_key(|(_, setting)| (std::cmp::Reverse(setting.roles.len()), setting.roles.clone()));
    let mut text = "| flag and variable | default | of | meaning |\n|---|---|---|---|\n".to_owned();
    for (name, setting) in settings {
        let roles = if setting.roles.len() == ROLES.len() { "all".to_owned() } else { setting.roles.join(", ") };
        text.push_str(&format!("| {name} | {} | {roles} | {} |\n", setting.default, setting.meaning));
    }
    text
}

fn name(argument: &Arg) -> String {
    let flag = argument.get_long().unwrap_or_default();
    format!("`--{flag}` `{}`", argument.get_env().unwrap_or_default().to_string_lossy())
}

fn default(argument: &Arg) -> String {
    let values: Vec<String> =
        argument.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    // How many cores a machine has is no default of the project.
    if argument.get_id() == "node_threads" { "one per core".to_owned() } else { values.join(" ") }
}

fn meaning(argument: &Arg) -> String {
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    help.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[test]
fn the_readme_lists_every_setting() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = std::fs::read_to_string(&path).unwrap();
    let begin = readme.find(BEGIN).expect("the README has the table's beginning") + BEGIN.len();
    let end = begin + readme[begin..].find(END).expect("the README has the table's end");

    if std::env::var_os("UPDATE_README").is_some() {
        std::fs::write(&path, format!("{}{}{}", &readme[..begin], table(), &readme[end..])).unwrap();
        return;
    }
    assert!(readme[begin..end] == table(), "the settings changed: run UPDATE_README=1 cargo test -p threadgate");
}
