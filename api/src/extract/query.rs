//! Queries: pages, filters and times to wait.

use axum::extract::FromRequestParts;
use http::request::Parts;
use threadgate_shared::domain::Json;

use crate::app::App;
use crate::error::ApiError;

/// The query of a request; of a parameter that stands twice the last counts.
#[derive(Debug, Default)]
pub struct ApiQuery(Vec<(String, String)>);

impl FromRequestParts<App> for ApiQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let query = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&parts.uri);
        let pairs = query.map_or_else(|_| Vec::new(), |query| query.0);
        for (name, value) in &pairs {
            app.limits.check_json(&Json::from(value.as_str()), &["query".into(), name.as_str().into()])?;
        }
        Ok(Self(pairs))
    }
}

impl ApiQuery {
    /// A parameter's text, if it is there.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// All texts of a parameter that may stand several times.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// `offset`, 0 where it is missing.
    ///
    /// # Errors
    /// 422 below 0 or beyond what can be counted.
    pub fn offset(&self) -> Result<i64, ApiError> {
        let offset = self.number("offset")?.unwrap_or(0);
        if offset < 0 {
            return Err(ApiError::unprocessable("offset must be >= 0"));
        }
        i64::try_from(offset).map_err(|_| ApiError::unprocessable(format!("offset must be <= {}", i64::MAX)))
    }

    /// `limit`, `default` where it is missing; never more than [`LIST_MAX`].
    ///
    /// # Errors
    /// 422 below 1.
    pub fn limit(&self, default: i64) -> Result<i64, ApiError> {
        let limit = self.number("limit")?.unwrap_or(default.into());
        if limit <= 0 {
            return Err(ApiError::unprocessable("limit must be > 0"));
        }
        Ok(i64::try_from(limit).unwrap_or(LIST_MAX).min(LIST_MAX))
    }

    /// Seconds to wait, `default` where the parameter is missing, at most [`WAIT_MAX_S`]; `true` and
    /// no value mean `bare`.
    ///
    /// # Errors
    /// 422 for anything that is no time.
    pub fn seconds(&self, name: &str, default: f64, bare: f64) -> Result<std::time::Duration, ApiError> {
        let seconds = match self.text(name) {
            None => default,
            Some("" | "true") => bare,
            Some("false") => 0.0,
            Some(text) => text.parse().unwrap_or(f64::NAN),
        };
        if !(0.0..).contains(&seconds) {
            let msg = "Input should be a number of seconds, 0 or more";
            return Err(ApiError::field(vec!["query".into(), name.into()], "float_parsing", msg));
        }
        Ok(std::time::Duration::from_secs_f64(seconds.min(WAIT_MAX_S)))
    }

    fn number(&self, name: &str) -> Result<Option<i128>, ApiError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let text = text.trim();
        let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            let msg = "Input should be a valid integer, unable to parse string as an integer";
            return Err(ApiError::field(vec!["query".into(), name.into()], "int_parsing", msg));
        }
        Ok(Some(text.parse().unwrap_or(if text.starts_with('-') { i128::MIN } else { i128::MAX })))
    }
}

/// Entries of one page at most; who asks for more gets so many.
pub const LIST_MAX: i64 = 1_000;

/// Seconds that one request waits at most.
pub const WAIT_MAX_S: f64 = 300.0;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// C84: pages at their edges.
    #[test]
    fn pages_are_bounded() {
        let query = |name: &str, value: &str| ApiQuery(vec![(name.to_owned(), value.to_owned())]);

        assert_eq!(query("limit", "5000").limit(100).unwrap(), 1000);
        assert_eq!(ApiQuery::default().limit(100).unwrap(), 100);
        for refused in ["0", "-1"] {
            assert_eq!(query("limit", refused).limit(100).unwrap_err().message, "limit must be > 0");
        }
        assert_eq!(query("offset", "-1").offset().unwrap_err().message, "offset must be >= 0");
        assert!(query("offset", "9223372036854775808").offset().is_err());
        for refused in ["", "abc", "1e3", "1.0"] {
            let error = query("limit", refused).limit(100).unwrap_err();
            assert_eq!((error.details[0].kind, &error.details[0].loc[0]), ("int_parsing", &json!("query")));
        }
        let twice = ApiQuery(vec![("limit".into(), "1".into()), ("limit".into(), "2".into())]);
        assert_eq!(twice.limit(100).unwrap(), 2);
    }

    #[test]
    fn times_to_wait_are_bounded() {
        let wait = |value: &str| ApiQuery(vec![("wait".into(), value.into())]).seconds("wait", 0.0, 30.0);

        assert_eq!(wait("").unwrap().as_secs(), 30);
        assert_eq!(wait("0.5").unwrap().as_millis(), 500);
        assert_eq!(wait("1e9").unwrap().as_secs(), 300);
        for refused in ["-1", "nan", "soon"] {
            assert!(wait(refused).is_err());
        }
    }
}
