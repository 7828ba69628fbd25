//! JSON to CEL and back, without losing a digit: numbers that CEL cannot hold exactly pass through
//! as values of their own, which can be moved and compared but not calculated with.

use std::collections::HashMap;
use std::sync::Arc;

use cel::Value;
use cel::objects::{Key, Map, Opaque};

use crate::domain::id::is_integer;
use crate::domain::{Json, JsonMap};

/// A number with more digits than CEL's types keep.
#[derive(Debug, PartialEq, Eq)]
struct ExactNumber(String);

impl Opaque for ExactNumber {
    fn runtime_type_name(&self) -> &str {
        "exact_number"
    }
}

/// Turns JSON into CEL values and remembers how long the longest list or map was.
#[derive(Debug, Default)]
pub(crate) struct Importer {
    pub longest: usize,
}

impl Importer {
    pub(crate) fn value(&mut self, json: &Json) -> Value {
        match json {
            Json::Null => Value::Null,
            Json::Bool(value) => Value::Bool(*value),
            Json::Number(number) => number_value(number),
            Json::String(text) => Value::String(Arc::new(text.clone())),
            Json::Array(items) => {
                self.longest = self.longest.max(items.len());
                Value::List(Arc::new(items.iter().map(|item| self.value(item)).collect()))
            }
            Json::Object(map) => {
                self.longest = self.longest.max(map.len());
                let entries: HashMap<Key, Value> =
                    map.iter().map(|(key, item)| (Key::String(Arc::new(key.clone())), self.value(item))).collect();
                Value::Map(Map { map: Arc::new(entries) })
            }
        }
    }
}

fn number_value(number: &serde_json::Number) -> Value {
    if is_integer(number) && number.to_string() != "-0" {
        if let Some(int) = number.as_i64() {
            return Value::Int(int);
        }
        if let Some(uint) = number.as_u64() {
            return Value::UInt(uint);
        }
    } else if let Some(float) = number.as_f64().filter(|float| is_exact(number, *float)) {
        return Value::Float(float);
    }
    Value::Opaque(Arc::new(ExactNumber(number.to_string())))
}

/// Whether the shortest text of `float` says the same number as `number`.
fn is_exact(number: &serde_json::Number, float: f64) -> bool {
    float.is_finite() && decimal(&number.to_string()) == decimal(&format!("{float:e}"))
}

/// Sign, digits without outer zeros, and the exponent of the last digit.
fn decimal(text: &str) -> Option<(bool, String, i64)> {
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (is_negative, mantissa) = mantissa.strip_prefix('-').map_or((false, mantissa), |rest| (true, rest));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let significant = digits.trim_end_matches('0');
    if significant.is_empty() {
        return Some((is_negative, String::new(), 0));
    }
    let dropped = i64::try_from(digits.len() - significant.len()).ok()?;
    let exponent = exponent.parse::<i64>().ok()?.checked_add(dropped)?;
    let exponent = exponent.checked_sub(i64::try_from(fraction.len()).ok()?)?;
    Some((is_negative, significant.trim_start_matches('0').to_owned(), exponent))
}

/// The JSON form of a CEL value; keys of maps in alphabetical order.
///
/// # Errors
/// A sentence for values that have none: functions, types, bytes, infinite numbers.
pub(crate) fn to_json(value: &Value) -> Result<Json, String> {
    Ok(match value {
        Value::Null => Json::Null,
        Value::Bool(value) => (*value).into(),
        Value::Int(value) => (*value).into(),
        Value::UInt(value) => (*value).into(),
        Value::Float(value) => match serde_json::Number::from_f64(*value) {
            Some(number) => Json::Number(number),
            None => return Err(format!("the expression's value is {value}, which JSON does not have")),
        },
        Value::String(text) => text.as_str().into(),
        Value::List(items) => items.iter().map(to_json).collect::<Result<Vec<_>, _>>()?.into(),
        Value::Map(map) => {
            let mut entries: Vec<(String, &Value)> = map.map.iter().map(|(k, v)| (k.to_string(), v)).collect();
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
            let entries = entries.into_iter().map(|(key, value)| Ok((key, to_json(value)?)));
            Json::Object(entries.collect::<Result<JsonMap, String>>()?)
        }
        Value::Timestamp(time) => time.to_rfc3339().into(),
        Value::Duration(span) => format!("{}s", span.as_seconds_f64()).into(),
        Value::Opaque(opaque) => match opaque.downcast_ref::<ExactNumber>() {
            Some(ExactNumber(digits)) => Json::Number(digits.parse().expect("its digits came from a JSON number")),
            None => return Err("the expression's value is optional; end it with .orValue(…)".to_owned()),
        },
        other => return Err(format!("the expression's value is a {}, which JSON does not have", other.type_of())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C87: every number comes back exactly, whether CEL can calculate with it or not.
    #[test]
    fn numbers_come_back_exactly() {
        for digits in [
            "0",
            "-1",
            "1.0",
            "0.1",
            "0.30000000000000004",
            "-0.0",
            "9007199254740993",
            "9223372036854775807",
            "18446744073709551615",
            "18446744073709551616",
            "-9223372036854775809",
            "1e+400",
            "0.12345678901234567890123",
            "1606938044258990275541962092341162602522202993782792835301376",
        ] {
            let number = Json::Number(digits.parse().unwrap());

            assert_eq!(to_json(&Importer::default().value(&number)).unwrap().to_string(), digits);
        }
    }

    #[test]
    fn numbers_are_calculated_with_where_that_is_exact() {
        let value = |digits: &str| number_value(&digits.parse().unwrap());

        assert_eq!(value("41"), Value::Int(41));
        assert_eq!(value("1.50"), Value::Float(1.5));
        assert_eq!(value("1e3"), Value::Float(1000.0));
        assert_eq!(value("18446744073709551615"), Value::UInt(u64::MAX));
        assert!(matches!(value("0.12345678901234567890123"), Value::Opaque(_)));
    }
}
