//! How values are spelled in SQLite: uuids and json as text, times as microseconds, enums as words.

use std::str::FromStr;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, ValueRef};

use crate::store::{StoreError, Time};

/// What the database answers.
pub(super) type Answer<T> = Result<T, sqlx::Error>;

/// Says what was being done when the database refused.
pub(super) trait Doing<T> {
    /// The error as the caller sees it; `doing` completes "could not …".
    fn doing(self, doing: &'static str) -> Result<T, StoreError>;
}

impl<T> Doing<T> for Answer<T> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|source| {
            if is_passing(&source) {
                return StoreError::Unavailable { doing, source };
            }
            match source {
                sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. } => {
                    StoreError::Corrupt { doing, message: source.to_string() }
                }
                source => StoreError::Database { doing, source },
            }
        })
    }
}

/// Whether the same call may succeed later: no connection, locked, full or failing disk.
fn is_passing(error: &sqlx::Error) -> bool {
    // Primary result codes of SQLite, in the low byte: busy, locked, I/O error, full, cannot open.
    const PASSING: [i32; 5] = [5, 6, 10, 13, 14];
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(error) => {
            error.code().and_then(|code| code.parse::<i32>().ok()).is_some_and(|code| PASSING.contains(&(code & 0xff)))
        }
        _ => false,
    }
}

/// Now, in whole microseconds, so that a time reads back as it was written.
pub(super) fn now() -> Time {
    from_micros(micros(Utc::now())).expect("today is a date")
}

/// The stored form of a time.
pub(super) fn micros(time: Time) -> i64 {
    time.timestamp_micros()
}

/// The stored form of a span; longer ones than a store ever needs are cut.
pub(super) fn span(span: Duration) -> i64 {
    // A thousand years: what is added to a time stays one.
    const LONGEST: i64 = 1_000 * 366 * 86_400 * 1_000_000;
    i64::try_from(span.as_micros()).unwrap_or(LONGEST).min(LONGEST)
}

fn from_micros(micros: i64) -> Option<Time> {
    DateTime::from_timestamp_micros(micros)
}

/// The stored form of a value: what serde writes, byte for byte.
pub(super) fn json_text<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).expect("our own types have string keys and finite numbers")
}

/// Reads typed columns by name.
pub(super) trait Columns {
    /// Text as it is.
    fn text(&self, column: &str) -> Answer<String>;
    /// An integer that fits.
    fn int<T: TryFrom<i64>>(&self, column: &str) -> Answer<T>;
    /// 0 or 1.
    fn flag(&self, column: &str) -> Answer<bool>;
    /// A time.
    fn time(&self, column: &str) -> Answer<Time>;
    /// Text in which a typed id is spelled.
    fn id<T: FromStr<Err: std::error::Error + Send + Sync + 'static>>(&self, column: &str) -> Answer<T>;
    /// A word of an enum.
    fn word<T>(&self, column: &str, parse: fn(&str) -> Option<T>) -> Answer<T>;
    /// Json text.
    fn json<T: DeserializeOwned>(&self, column: &str) -> Answer<T>;
    /// `None` for null, else what `read` finds.
    fn opt<T>(&self, column: &str, read: impl FnOnce(&Self, &str) -> Answer<T>) -> Answer<Option<T>>;
}

impl Columns for SqliteRow {
    fn text(&self, column: &str) -> Answer<String> {
        self.try_get(column)
    }

    fn int<T: TryFrom<i64>>(&self, column: &str) -> Answer<T> {
        let value: i64 = self.try_get(column)?;
        T::try_from(value).map_err(|_| cannot_be(column, format!("the number {value} is out of range")))
    }

    fn flag(&self, column: &str) -> Answer<bool> {
        self.int::<i64>(column).map(|value| value != 0)
    }

    fn time(&self, column: &str) -> Answer<Time> {
        let value: i64 = self.try_get(column)?;
        from_micros(value).ok_or_else(|| cannot_be(column, format!("{value} is no time")))
    }

    fn id<T: FromStr<Err: std::error::Error + Send + Sync + 'static>>(&self, column: &str) -> Answer<T> {
        let text: &str = self.try_get(column)?;
        text.parse().map_err(|error| cannot_be(column, error))
    }

    fn word<T>(&self, column: &str, parse: fn(&str) -> Option<T>) -> Answer<T> {
        let text: &str = self.try_get(column)?;
        parse(text).ok_or_else(|| cannot_be(column, format!("the word '{text}' is unknown")))
    }

    fn json<T: DeserializeOwned>(&self, column: &str) -> Answer<T> {
        let text: &str = self.try_get(column)?;
        serde_json::from_str(text).map_err(|error| cannot_be(column, error))
    }

    fn opt<T>(&self, column: &str, read: impl FnOnce(&Self, &str) -> Answer<T>) -> Answer<Option<T>> {
        if self.try_get_raw(column)?.is_null() {
            return Ok(None);
        }
        read(self, column).map(Some)
    }
}

fn cannot_be(column: &str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> sqlx::Error {
    sqlx::Error::ColumnDecode { index: column.to_owned(), source: source.into() }
}
