//! Replays recorded request/response pairs against a running server and names the first difference
//! by JSON pointer. The recordings are in `tests/golden`; `GOLDEN_DIR` names another folder of the
//! same form.

mod better;
mod compare;
mod setup;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

pub use compare::{difference, header_difference};

/// The profiles whose graphs and settings the harness can start today.
pub const PROFILES: [&str; 5] = ["open-linear", "open-loop", "intid-linear", "bigint-linear", "named-linear"];

/// Cases that had run on the recordings' server before another without being named there: its answer
/// shows them.
const UNNAMED: [(&str, &str); 1] = [("fix_nothing_to_do", "invoke_second_turn_same_thread")];

/// One recorded pair.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name, which is its file's.
    pub name: String,
    /// Which server it was recorded on.
    pub profile: String,
    /// Cases to replay before it.
    pub after: Vec<String>,
    /// The whole recording.
    pub json: Value,
}

impl Case {
    /// Whether it is a WebSocket conversation, which the wire issue brings.
    #[must_use]
    pub fn is_websocket(&self) -> bool {
        self.json["request"]["method"] == "WS"
    }

    fn note(&self) -> &str {
        self.json["note"].as_str().unwrap_or_default()
    }
}

/// The folder of the recordings.
#[must_use]
pub fn folder() -> PathBuf {
    std::env::var_os("GOLDEN_DIR").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("golden"), PathBuf::from)
}

/// All recordings, by name.
///
/// # Errors
/// If the folder cannot be read or a file is no recording.
pub fn load(folder: &Path) -> Result<BTreeMap<String, Case>> {
    let mut cases = BTreeMap::new();
    let entries = std::fs::read_dir(folder).with_context(|| format!("read the recordings in {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !name.ends_with(".json") || name.starts_with('_') {
            continue;
        }
        let json: Value = serde_json::from_slice(&std::fs::read(&path)?).with_context(|| path.display().to_string())?;
        let text = |key: &str| json[key].as_str().map(str::to_owned);
        let (Some(name), Some(profile)) = (text("name"), text("profile")) else {
            bail!("{} has no name or no profile", path.display());
        };
        let after = json["after"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|name| name.as_str().map(str::to_owned))
            .collect();
        cases.insert(name.clone(), Case { name, profile, after, json });
    }
    Ok(cases)
}

/// The cases to replay before `case`, in order, without itself.
///
/// # Errors
/// If a named case is missing.
pub fn chain<'a>(cases: &'a BTreeMap<String, Case>, case: &'a Case) -> Result<Vec<&'a Case>> {
    let mut chain: Vec<&Case> = Vec::new();
    let unnamed = UNNAMED.iter().filter(|(name, before)| *name == case.name && cases.contains_key(*before));
    for name in case.after.iter().map(String::as_str).chain(unnamed.map(|(_, before)| *before)) {
        let before =
            cases.get(name).with_context(|| format!("{} comes after {name}, which is not there", case.name))?;
        for earlier in self::chain(cases, before)?.into_iter().chain([before]) {
            if !chain.iter().any(|known| known.name == earlier.name) {
                chain.push(earlier);
            }
        }
    }
    Ok(chain)
}

/// A server that was just started for one case.
#[derive(Debug, Clone)]
pub struct Target {
    /// Where it listens.
    pub base: String,
    /// What it calls its store; stands where the recording has the reference's class.
    pub checkpointer_type: String,
    /// The client.
    pub http: reqwest::Client,
}

/// What the server answered.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// Header names are lower case.
    pub headers: BTreeMap<String, String>,
    /// The body's bytes.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as JSON; null where it is none.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The chunks of a stream, one object a line.
    ///
    /// # Errors
    /// If a line is not JSON.
    pub fn chunks(&self) -> Result<Vec<Value>> {
        let text = std::str::from_utf8(&self.body)?;
        text.lines().map(|line| serde_json::from_str(line).with_context(|| format!("chunk {line:?}"))).collect()
    }
}

impl Target {
    /// Sends the recorded request of `case`.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn send(&self, case: &Case) -> Result<Answer> {
        let request = &case.json["request"];
        let method: reqwest::Method = request["method"].as_str().context("a method")?.parse()?;
        let path = request["path"].as_str().context("a path")?;
        let mut builder = self.http.request(method, format!("{}{path}", self.base));
        for (name, value) in request["headers"].as_object().into_iter().flatten() {
            builder = builder.header(name, value.as_str().unwrap_or_default());
        }
        if let Some(raw) = request["raw_body"].as_str() {
            builder = builder.body(raw.to_owned());
        } else if let Some(body) = request.get("body") {
            builder = builder.header("content-type", "application/json").body(body.to_string());
        }
        Self::read(builder).await
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        let builder = self.http.post(format!("{}{path}", self.base));
        Self::read(builder.header("content-type", "application/json").body(body.to_string())).await
    }

    async fn get(&self, path: &str) -> Result<Answer> {
        Self::read(self.http.get(format!("{}{path}", self.base))).await
    }

    async fn read(builder: reqwest::RequestBuilder) -> Result<Answer> {
        let response = builder.send().await?;
        let status = response.status().as_u16();
        let mut headers: BTreeMap<String, String> = BTreeMap::new();
        for (name, value) in response.headers() {
            let value = value.to_str().unwrap_or_default();
            headers
                .entry(name.to_string())
                .and_modify(|all| *all = format!("{all}, {value}"))
                .or_insert(value.to_owned());
        }
        Ok(Answer { status, headers, body: response.bytes().await?.to_vec() })
    }
}

/// Replays `case`, after those it comes after, on a fresh `target`; `Ok(Some(_))` names the first
/// difference.
///
/// # Errors
/// If a request could not be sent.
pub async fn replay(cases: &BTreeMap<String, Case>, case: &Case, target: &Target) -> Result<Option<String>> {
    for before in chain(cases, case)? {
        setup::perform(before, target).await.with_context(|| format!("before it: {}", before.name))?;
    }
    let answer = setup::perform(case, target).await?;
    better::check(case, &answer, target)
}
