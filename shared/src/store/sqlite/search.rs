//! One page of a list, searched without regard to case.
//!
//! SQLite folds ASCII only, so a search reads the list in order and compares here.

use futures::{Stream, TryStreamExt};
use sqlx::sqlite::SqliteRow;

use super::row::Answer;
use crate::store::{Page, ThreadRecord};

/// How a list is read.
pub(super) struct Reading {
    needle: Option<String>,
    page: Page,
}

impl Reading {
    /// That page of what contains `search`; nothing searched for is everything.
    pub(super) fn new(search: Option<&str>, page: Page) -> Self {
        Self { needle: search.filter(|text| !text.is_empty()).map(str::to_lowercase), page }
    }

    /// What the statement may return at most; −1 = all.
    pub(super) fn sql_limit(&self) -> i64 {
        if self.needle.is_some() { -1 } else { self.page.limit.max(0) }
    }

    /// What the statement leaves out.
    pub(super) fn sql_offset(&self) -> i64 {
        if self.needle.is_some() { 0 } else { self.page.offset.max(0) }
    }

    /// The page; `text` is what is searched.
    pub(super) async fn collect<T>(
        self,
        rows: impl Stream<Item = Answer<SqliteRow>> + Send,
        read: fn(&SqliteRow) -> Answer<T>,
        text: fn(&T) -> String,
    ) -> Answer<Vec<T>> {
        let mut rows = std::pin::pin!(rows);
        let (mut found, mut to_skip) = (Vec::new(), self.page.offset);
        while let Some(row) = rows.try_next().await? {
            let item = read(&row)?;
            if let Some(needle) = &self.needle {
                if !text(&item).to_lowercase().contains(needle) {
                    continue;
                }
                if to_skip > 0 {
                    to_skip -= 1;
                    continue;
                }
                if i64::try_from(found.len()).is_ok_and(|count| count >= self.page.limit) {
                    break;
                }
            }
            found.push(item);
        }
        Ok(found)
    }
}

/// Every value of a thread's record, a line each, so that no match crosses from one to the next.
pub(super) fn record_text(record: &ThreadRecord) -> String {
    let meta = record.meta.as_ref().map(ToString::to_string);
    let updated_at = record.updated_at.format("%Y-%m-%dT%H:%M:%S%.6f").to_string();
    let values = [
        Some(record.id.as_str()),
        record.name.as_deref(),
        Some(record.user.as_str()),
        meta.as_deref(),
        record.run_id.as_deref(),
        Some(&updated_at),
    ];
    values.into_iter().flatten().collect::<Vec<_>>().join("\n")
}
