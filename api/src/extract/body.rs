//! Bodies: JSON objects within the limits.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use futures::StreamExt;
use http::header::CONTENT_TYPE;
use threadgate_shared::domain::{FieldError, Json, JsonMap, Limits, ThreadId};
use tokio::time::{Instant, timeout_at};

use crate::app::App;
use crate::error::ApiError;
use crate::json;

/// A request's body: an object that passed the limits on JSON.
#[derive(Debug, Clone, PartialEq)]
pub struct Fields {
    map: JsonMap,
}

/// A body that is read into `T`.
#[derive(Debug)]
pub struct ApiJson<T>(pub T);

/// What a body can be read into.
pub trait FromFields: Sized {
    /// The fields it knows; one that stands twice is a mistake.
    const KNOWN: &'static [&'static str];

    /// Reads the fields.
    ///
    /// # Errors
    /// 422, with what is wrong field by field.
    fn from_fields(fields: Fields, limits: &Limits) -> Result<Self, ApiError>;
}

impl<T: FromFields> FromRequest<App> for ApiJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let is_json = is_json(request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()));
        let bytes = read(request.into_body(), app.limits.body_bytes_max).await?;
        if bytes.is_empty() {
            return Err(ApiError::field(vec!["body".into()], "missing", "Field required"));
        }
        if !is_json {
            return Err(not_an_object());
        }
        let map = match json::parse(&bytes)? {
            Json::Object(map) => map,
            Json::Null => return Err(ApiError::field(vec!["body".into()], "missing", "Field required")),
            _ => return Err(not_an_object()),
        };
        if let Some(loc) = json::repeated_field(&bytes, T::KNOWN) {
            return Err(ApiError::field(loc, "value_error", "Value error, this field stands twice; send it once"));
        }
        drop(bytes);
        let value = Json::Object(map);
        app.limits.check_json(&value, &["body".into()])?;
        let Json::Object(map) = value else { return Err(not_an_object()) };
        T::from_fields(Fields { map }, &app.limits).map(Self)
    }
}

impl Fields {
    /// The fields of `map`, for tests and for parts of a body.
    #[must_use]
    pub fn new(map: JsonMap) -> Self {
        Self { map }
    }

    /// The value of a field, if it is there.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Json> {
        self.map.get(name)
    }

    /// All of it as JSON text.
    #[must_use]
    pub fn to_text(&self) -> String {
        serde_json::to_string(&self.map).expect("a JSON object has string keys")
    }

    /// Takes the value of a field, if it is there.
    pub fn take(&mut self, name: &str) -> Option<Json> {
        self.map.get_mut(name).map(Json::take)
    }

    /// An object, or nothing where the field is missing or null.
    ///
    /// # Errors
    /// `dict_type` for anything else.
    pub fn object(&mut self, name: &'static str) -> Result<JsonMap, FieldError> {
        match self.take(name) {
            None | Some(Json::Null) => Ok(JsonMap::new()),
            Some(Json::Object(map)) => Ok(map),
            Some(_) => Err(wrong(name, "dict_type", "Input should be a valid dictionary")),
        }
    }

    /// A text, if it is there.
    ///
    /// # Errors
    /// `string_type` for anything but text or null.
    pub fn text(&mut self, name: &'static str) -> Result<Option<String>, FieldError> {
        match self.take(name) {
            None | Some(Json::Null) => Ok(None),
            Some(Json::String(text)) => Ok(Some(text)),
            Some(_) => Err(wrong(name, "string_type", "Input should be a valid string")),
        }
    }

    /// One of `words`, the first of which stands for a missing field.
    ///
    /// # Errors
    /// `enum` for anything else; words are case-exact.
    pub fn word(&mut self, name: &'static str, words: &[&'static str]) -> Result<&'static str, FieldError> {
        match self.take(name) {
            None => Ok(words[0]),
            Some(value) => words.iter().find(|word| value.as_str() == Some(word)).copied().ok_or_else(|| {
                let listed: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
                wrong(name, "enum", format!("Input should be one of {}", listed.join(", ")))
            }),
        }
    }

    /// A whole number in `range`, if it is there; numeric text counts.
    ///
    /// # Errors
    /// The kind says whether it is no number, too small or too large.
    pub fn int(&mut self, name: &'static str, range: std::ops::RangeInclusive<i64>) -> Result<Option<i64>, FieldError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        int_of(&value, &range).map(Some).map_err(|(kind, msg)| wrong(name, kind, msg))
    }

    /// The thread that the field `thread_id` of a stop or a fix names: text only, trimmed.
    ///
    /// # Errors
    /// 422; blank text has the kind that `blank` gives.
    pub fn thread_id(&mut self, limits: &Limits) -> Result<ThreadId, FieldError> {
        let loc = ["body".into(), "thread_id".into()];
        match self.take("thread_id") {
            None => Err(wrong("thread_id", "missing", "Field required")),
            Some(Json::String(text)) if text.is_empty() => {
                Err(wrong("thread_id", "string_too_short", "String should have at least 1 character"))
            }
            Some(Json::String(text)) => {
                limits.check_id(text.trim(), &loc)?;
                Ok(ThreadId(text.trim().to_owned()))
            }
            Some(_) => Err(wrong("thread_id", "string_type", "Input should be a valid string")),
        }
    }
}

/// A wrong field of the body.
fn wrong(name: &str, kind: &'static str, msg: impl Into<String>) -> FieldError {
    FieldError { loc: vec!["body".into(), name.into()], msg: msg.into(), kind }
}

/// The whole number that `value` spells, if it lies in `range`.
fn int_of(value: &Json, range: &std::ops::RangeInclusive<i64>) -> Result<i64, (&'static str, String)> {
    let text = match value {
        Json::Number(number) => number.to_string(),
        Json::String(text) => text.trim().to_owned(),
        _ => return Err(("int_type", "Input should be a valid integer".to_owned())),
    };
    let whole = text.split_once('.').filter(|(_, zeros)| zeros.bytes().all(|b| b == b'0')).map_or(&*text, |(w, _)| w);
    let digits = whole.strip_prefix(['-', '+']).unwrap_or(whole);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        let msg = "Input should be a valid integer, unable to parse string as an integer";
        return Err(("int_parsing", msg.to_owned()));
    }
    // Digits that are too many for a number of ours are beyond every range.
    let number = whole.parse().unwrap_or(if whole.starts_with('-') { i64::MIN } else { i64::MAX });
    if number < *range.start() {
        return Err(("greater_than_equal", format!("Input should be greater than or equal to {}", range.start())));
    }
    if number > *range.end() {
        return Err(("less_than_equal", format!("Input should be less than or equal to {}", range.end())));
    }
    Ok(number)
}

fn not_an_object() -> ApiError {
    let msg = "Input should be a valid dictionary or object to extract fields from";
    ApiError::field(vec!["body".into()], "model_attributes_type", msg)
}

/// `application/json` or `application/*+json`.
fn is_json(content_type: Option<&str>) -> bool {
    let media = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    media.strip_prefix("application/").is_some_and(|sub| sub == "json" || sub.ends_with("+json"))
}

/// How long a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

fn too_slow() -> ApiError {
    let message = format!("the body took longer than {} s to arrive; send it again", BODY_TIMEOUT.as_secs());
    ApiError::plain(http::StatusCode::REQUEST_TIMEOUT, message)
}

/// The whole body, unless it runs over `limit` or takes too long.
async fn read(body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    let until = Instant::now() + BODY_TIMEOUT;
    while let Some(piece) = timeout_at(until, stream.next()).await.map_err(|_| too_slow())? {
        let piece = piece.map_err(|error| {
            tracing::debug!(%error, "Could not read a request's body");
            ApiError::plain(http::StatusCode::BAD_REQUEST, "the body ended early; send it again")
        })?;
        if bytes.len() + piece.len() > limit {
            return Err(ApiError::too_large(limit, false));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Json) -> Fields {
        Fields::new(value.as_object().cloned().unwrap_or_default())
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_given_up() {
        let body = Body::from_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>());

        let error = read(body, 1_000).await.unwrap_err();

        assert_eq!(error.status, http::StatusCode::REQUEST_TIMEOUT);
    }

    /// C84: numbers at their edges are a value or a field error.
    #[test]
    fn numbers_are_taken_in_their_range() {
        let int = |value: Json| fields(json!({"n": value})).int("n", 1..=100);

        assert_eq!(fields(json!({})).int("n", 1..=100), Ok(None));
        for (given, taken) in [(json!(30), 30), (json!("30"), 30), (json!(30.0), 30), (json!(" 7 "), 7)] {
            assert_eq!(int(given), Ok(Some(taken)));
        }
        let huge: Json = serde_json::from_str("1180591620717411303424").unwrap();
        for (refused, kind) in [
            (json!(0), "greater_than_equal"),
            (json!(101), "less_than_equal"),
            (huge, "less_than_equal"),
            (json!("abc"), "int_parsing"),
            (json!(""), "int_parsing"),
            (json!(1.5), "int_parsing"),
            (json!(true), "int_type"),
            (json!(null), "int_type"),
        ] {
            assert_eq!(int(refused).unwrap_err().kind, kind);
        }
    }

    #[test]
    fn json_media_types_only() {
        assert!(is_json(Some("application/json; charset=utf-8")));
        assert!(is_json(Some("Application/Problem+JSON")));
        assert!(!is_json(Some("text/plain")));
        assert!(!is_json(None));
    }
}
