//! How many bytes a value takes as JSON, without writing it.

use std::io::{self, Write};

use serde::Serialize;

/// The bytes of `value` as JSON.
#[must_use]
pub fn json_bytes<T: Serialize + ?Sized>(value: &T) -> usize {
    let mut counter = Counter(0);
    serde_json::to_writer(&mut counter, value).expect("counting never fails, and our types have string keys");
    counter.0
}

struct Counter(usize);

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_those_of_the_text() {
        let value = serde_json::json!({"a": [1, 2.50, "ü"], "b": null});

        assert_eq!(json_bytes(&value), value.to_string().len());
    }
}
