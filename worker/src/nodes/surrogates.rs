//! JSON from elsewhere may hold lone surrogates (`"\ud83d"`): half a character, which no Rust string
//! can be. They are kept by an escape that loses nothing.
//!
//! A lone surrogate becomes U+FFFD (the replacement character, which is what most programs show in
//! its place) followed by its four hex digits: `\ud83d` → `�D83D`. A U+FFFD that was there before
//! and that four such digits follow becomes `�FFFD`, so every text comes from one text only. All
//! other text stays byte for byte.

use std::borrow::Cow;
use std::fmt::Write;

/// The JSON text `json` with every lone surrogate in its strings and keys escaped. Text that is not
/// JSON is left for the parser to refuse.
pub(crate) fn escaped(json: &str) -> Cow<'_, str> {
    if !may_need_it(json) {
        return Cow::Borrowed(json);
    }
    let mut out = String::with_capacity(json.len() + 16);
    let mut rest = json;
    while let Some(start) = rest.find('"') {
        let (before, string) = rest.split_at(start + 1);
        out.push_str(before);
        let end = string_end(string);
        out.push_str(&string_escaped(&string[..end]));
        rest = &string[end..];
        if let Some(after) = rest.strip_prefix('"') {
            out.push('"');
            rest = after;
        }
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Whether a surrogate is written out, or a replacement character stands where it could be mistaken.
fn may_need_it(json: &str) -> bool {
    let written = |digits: &str| {
        let digits = digits.as_bytes();
        digits.len() >= 2
            && digits[0].eq_ignore_ascii_case(&b'd')
            && matches!(digits[1], b'8' | b'9' | b'a'..=b'f' | b'A'..=b'F')
    };
    json.match_indices("\\u").any(|(at, _)| written(&json[at + 2..]) || is_replacement(&json[at + 2..]))
        || json.contains('\u{FFFD}')
}

fn is_replacement(digits: &str) -> bool {
    digits.get(..4).is_some_and(|digits| digits.eq_ignore_ascii_case("fffd"))
}

/// Where the string that `text` begins inside of ends: at its closing quote.
fn string_end(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return at,
            _ => {}
        }
    }
    text.len()
}

/// One piece of a string's inside.
enum Unit<'a> {
    /// Anything, as it is written.
    Written(&'a str),
    /// Half a pair, its four digits.
    Lone(u16),
    /// U+FFFD, as it is written.
    Replacement(&'a str),
}

fn string_escaped(inside: &str) -> String {
    let mut out = String::with_capacity(inside.len() + 8);
    let mut rest = inside;
    while !rest.is_empty() {
        let (unit, length) = next_unit(rest);
        rest = &rest[length..];
        match unit {
            Unit::Written(text) => out.push_str(text),
            Unit::Lone(half) => {
                let _ = write!(out, "\u{FFFD}{half:04X}"); // Writing to a string does not fail.
            }
            Unit::Replacement(text) if looks_escaped(rest) => {
                out.push_str(text);
                out.push_str("FFFD");
            }
            Unit::Replacement(text) => out.push_str(text),
        }
    }
    out
}

fn next_unit(text: &str) -> (Unit<'_>, usize) {
    if let Some(half) = surrogate(text) {
        let is_high = half < 0xDC00;
        if is_high && surrogate(&text[6..]).is_some_and(|low| low >= 0xDC00) {
            return (Unit::Written(&text[..12]), 12);
        }
        return (Unit::Lone(half), 6);
    }
    if text.strip_prefix("\\u").is_some_and(is_replacement) {
        return (Unit::Replacement(&text[..6]), 6);
    }
    let first = text.chars().next().map_or(1, char::len_utf8);
    if text.starts_with('\u{FFFD}') {
        return (Unit::Replacement(&text[..first]), first);
    }
    // A backslash takes what it escapes along.
    let length = match text.as_bytes() {
        [b'\\', b'u', ..] if text.is_char_boundary(6) => 6,
        [b'\\', _, ..] => 1 + text[1..].chars().next().map_or(0, char::len_utf8),
        _ => first,
    };
    (Unit::Written(&text[..length]), length)
}

/// The surrogate that `text` begins with as an escape.
fn surrogate(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    let unit = u16::from_str_radix(digits, 16).ok().filter(|_| digits.bytes().all(|b| b.is_ascii_hexdigit()))?;
    (0xD800..=0xDFFF).contains(&unit).then_some(unit)
}

/// Whether four characters follow, written in whatever way, that a reader could take for an escape.
fn looks_escaped(rest: &str) -> bool {
    let mut digits = String::with_capacity(4);
    let mut rest = rest;
    while digits.len() < 4 && !rest.is_empty() {
        let (unit, length) = next_unit(rest);
        let Unit::Written(written) = unit else { return false };
        let plain = written.strip_prefix("\\u").and_then(|hex| u32::from_str_radix(hex.get(..4)?, 16).ok());
        match plain.and_then(char::from_u32).or_else(|| written.chars().next()) {
            Some(digit) if digit.is_ascii_hexdigit() && !digit.is_ascii_lowercase() => digits.push(digit),
            _ => return false,
        }
        rest = &rest[length..];
    }
    digits == "FFFD"
        || u16::from_str_radix(&digits, 16).is_ok_and(|unit| digits.len() == 4 && (0xD800..=0xDFFF).contains(&unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(json: &str) -> String {
        serde_json::from_str(&escaped(json)).unwrap()
    }

    /// The UTF-16 units a text stands for: proves that the escape loses nothing.
    fn units(text: &str) -> Vec<u16> {
        let mut units = Vec::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            rest = &rest[first.len_utf8()..];
            let digits = rest.get(..4).unwrap_or_default();
            let unit = u16::from_str_radix(digits, 16).ok().filter(|_| digits == digits.to_uppercase());
            match unit.filter(|unit| first == '\u{FFFD}' && (*unit == 0xFFFD || (0xD800..=0xDFFF).contains(unit))) {
                Some(unit) => {
                    units.push(unit);
                    rest = &rest[4..];
                }
                None => units.extend(first.encode_utf16(&mut [0; 2]).iter()),
            }
        }
        units
    }

    /// C86
    #[test]
    fn lone_surrogates_are_kept_by_an_escape() {
        assert_eq!(parsed(r#""a\ud83db""#), "a\u{FFFD}D83Db");
        assert_eq!(parsed(r#""\udc00""#), "\u{FFFD}DC00");
        assert_eq!(parsed(r#""\uDC00\uD83D""#), "\u{FFFD}DC00\u{FFFD}D83D");
        assert_eq!(escaped(r#"{"\ud800": ["\udfff"]}"#), "{\"\u{FFFD}D800\": [\"\u{FFFD}DFFF\"]}");
    }

    /// C86
    #[test]
    fn pairs_and_plain_text_stay_as_they_are() {
        assert_eq!(parsed(r#""\ud83d\ude00""#), "😀");
        assert_eq!(parsed(r#""\\ud83d and \\u0000""#), r"\ud83d and \u0000");
        assert_eq!(parsed(r#""\ufffd and \u00e9""#), "\u{FFFD} and é");
        for same in [r#"{"a": "b\"c\\", "d": 1e400}"#, r#""\n\t""#, "no json \\ud83d", "\"open \\"] {
            assert_eq!(escaped(same), same);
        }
    }

    #[test]
    fn no_two_texts_become_one() {
        for json in [
            r#""\ud83d""#,
            r#""\ufffdD83D""#,
            "\"\u{FFFD}D83D\"",
            "\"\u{FFFD}FFFD\"",
            "\"\u{FFFD}FFFDD83D\"",
            r#""\ufffd\u0044\u0038\u0033\u0044""#,
            "\"\u{FFFD}d83d\"",
            "\"\u{FFFD}\u{FFFD}D83D\"",
            r#""\ufffd\ud83d""#,
        ] {
            let inside: Vec<u16> = utf16(json);

            assert_eq!(units(&parsed(json)), inside, "{json}");
        }
    }

    /// The UTF-16 units of a JSON string, lone surrogates included.
    fn utf16(json: &str) -> Vec<u16> {
        let mut units = Vec::new();
        let mut rest = json.trim_matches('"');
        while let Some(first) = rest.chars().next() {
            if let Some(hex) = rest.strip_prefix("\\u") {
                units.push(u16::from_str_radix(&hex[..4], 16).unwrap());
                rest = &hex[4..];
            } else {
                units.extend(first.encode_utf16(&mut [0; 2]).iter());
                rest = &rest[first.len_utf8()..];
            }
        }
        units
    }
}
