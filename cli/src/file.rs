//! `threadgate.yaml`: the same settings as flags and environment, below both. A key is a flag's long
//! name with `_` for `-`; one file may serve all roles.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Command;
use serde_json::{Map, Value};

/// The file that is read where none is named.
pub const DEFAULT_PATH: &str = "threadgate.yaml";

/// `command` with the file's values as the defaults of its flags. The file is the one `--config` or
/// `THREADGATE_CONFIG` names, else [`DEFAULT_PATH`] if it is there.
///
/// # Errors
/// If a named file cannot be read, or holds what no flag of any role is called.
pub fn with_defaults(command: Command, arguments: &[OsString]) -> Result<Command> {
    let named = named_by(arguments).or_else(|| std::env::var_os("THREADGATE_CONFIG").map(PathBuf::from));
    let path = match named {
        Some(path) => path,
        None if Path::new(DEFAULT_PATH).exists() => PathBuf::from(DEFAULT_PATH),
        None => return Ok(command),
    };
    let doing = || format!("could not read the settings in {}", path.display());
    let text = std::fs::read_to_string(&path).with_context(doing)?;
    let settings: Option<Map<String, Value>> = serde_saphyr::from_str(&text).with_context(doing)?;
    apply(command, &settings.unwrap_or_default()).with_context(doing)
}

/// What `--config` names, looked for before the arguments are parsed.
fn named_by(arguments: &[OsString]) -> Option<PathBuf> {
    let mut rest = arguments.iter().skip(1).take_while(|argument| *argument != "--");
    while let Some(argument) = rest.next() {
        if argument == "--config" {
            return rest.next().map(PathBuf::from);
        }
        if let Some(path) = argument.to_str().and_then(|text| text.strip_prefix("--config=")) {
            return Some(PathBuf::from(path));
        }
    }
    None
}

fn apply(command: Command, settings: &Map<String, Value>) -> Result<Command> {
    let mut unknown: BTreeSet<&str> = settings.keys().map(String::as_str).collect();
    let mut values = Vec::new();
    for (key, value) in settings {
        values.push((key.replace('_', "-"), as_text(key, value)?));
    }
    let command = with_values(command, &values, &mut unknown);
    if let Some(key) = unknown.first() {
        bail!("'{key}' is no setting; a key is a flag's name with '_' for '-', such as database_url or lease_ttl");
    }
    Ok(command)
}

/// Sets the values in `command` and what is below it; takes those that found a flag from `unknown`.
fn with_values(mut command: Command, values: &[(String, String)], unknown: &mut BTreeSet<&str>) -> Command {
    for (flag, value) in values {
        // What has an environment variable is a setting; the other flags belong to one call.
        let is_setting = |argument: &&clap::Arg| argument.get_long() == Some(flag) && argument.get_env().is_some();
        let Some(argument) = command.get_arguments().find(is_setting) else {
            continue;
        };
        let (id, is_secret) = (argument.get_id().clone(), argument.is_hide_env_values_set());
        unknown.remove(flag.replace('-', "_").as_str());
        let value = value.clone();
        // Help shows where a default comes from, but no password.
        command = command.mut_arg(id, |argument| argument.default_value(value).hide_default_value(is_secret));
    }
    let below: Vec<String> = command.get_subcommands().map(|below| below.get_name().to_owned()).collect();
    below
        .into_iter()
        .fold(command, |command, name| command.mut_subcommand(name, |below| with_values(below, values, &mut *unknown)))
}

/// A value as it would stand on the command line.
fn as_text(key: &str, value: &Value) -> Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Bool(_) | Value::Number(_) => Ok(value.to_string()),
        Value::Array(items) => {
            let items: Result<Vec<String>> = items.iter().map(|item| as_text(key, item)).collect();
            Ok(items?.join(","))
        }
        Value::Null | Value::Object(_) => {
            bail!("'{key}' must be a text, a number, true, false or a list of them")
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};
    use serde_json::json;

    use super::*;

    fn command() -> Command {
        let pools = Arg::new("pools").long("pools").env("THREADGATE_TEST_POOLS").value_delimiter(',');
        let slots = Arg::new("slots").long("worker-slots").env("THREADGATE_TEST_SLOTS").default_value("64");
        let quiet = Arg::new("quiet").long("quiet").env("THREADGATE_TEST_QUIET").action(ArgAction::SetTrue);
        let limit = Arg::new("limit").long("limit");
        let runs = Command::new("runs").args([limit]);
        Command::new("threadgate").subcommand(Command::new("worker").args([pools, slots, quiet])).subcommand(runs)
    }

    fn settings(value: Value) -> Map<String, Value> {
        let Value::Object(settings) = value else { panic!("an object") };
        settings
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let settings = settings(json!({"pools": ["gpu", "default"], "worker_slots": 3, "quiet": true}));
        let command = apply(command(), &settings).unwrap();

        let from_file = command.clone().get_matches_from(["threadgate", "worker"]);
        let (_, worker) = from_file.subcommand().unwrap();
        assert_eq!(worker.get_many::<String>("pools").unwrap().collect::<Vec<_>>(), ["gpu", "default"]);
        assert_eq!(worker.get_one::<String>("slots").unwrap(), "3");
        assert!(worker.get_flag("quiet"));

        let from_flags = command.get_matches_from(["threadgate", "worker", "--worker-slots", "9"]);
        assert_eq!(from_flags.subcommand().unwrap().1.get_one::<String>("slots").unwrap(), "9");
    }

    #[test]
    fn a_key_that_no_flag_is_called_is_refused_by_name() {
        let error = apply(command(), &settings(json!({"slot": 3}))).unwrap_err();

        assert!(error.to_string().contains("'slot'"), "{error}");
        let error = apply(command(), &settings(json!({"pools": {"gpu": 1}}))).unwrap_err();
        assert!(error.to_string().contains("'pools'"), "{error}");
    }

    #[test]
    fn a_flag_of_one_call_is_no_setting() {
        let error = apply(command(), &settings(json!({"limit": 3}))).unwrap_err();

        assert!(error.to_string().contains("'limit' is no setting"), "{error}");
    }

    #[test]
    fn the_file_is_found_before_the_arguments_are_parsed() {
        let find = |arguments: &[&str]| named_by(&arguments.iter().map(OsString::from).collect::<Vec<_>>());

        assert_eq!(find(&["threadgate", "worker", "--config", "a.yaml"]), Some("a.yaml".into()));
        assert_eq!(find(&["threadgate", "--config=b.yaml", "api"]), Some("b.yaml".into()));
        assert_eq!(find(&["threadgate", "run", "g", "--", "--config=c.yaml"]), None);
    }
}
