//! The shapes of objects on the wire as data, and the one function that checks a value against its
//! shape, fills in defaults and drops what the shape does not know. Values stay JSON, so that
//! numbers keep their digits.

use super::id::is_integer;
use super::message::FieldError;
use super::{Json, JsonMap};

/// How many mistakes one request is told about.
const ERRORS_MAX: usize = 32;

/// The fields of an object, in the order they are written.
pub(crate) type Shape = &'static [Field];

/// One field of a [`Shape`].
pub(crate) struct Field {
    pub name: &'static str,
    pub kind: Kind,
    pub missing: Missing,
    /// Whether null is a value too.
    pub nullable: bool,
}

/// What a field may hold.
pub(crate) enum Kind {
    Text,
    /// Numeric text counts as its number.
    Int,
    /// Finite; numeric text counts as its number.
    Number,
    Bool,
    /// An object whose keys are free.
    Object,
    Any,
    OneOf(&'static [&'static str]),
    List(&'static Kind),
    /// Two integers.
    IntPair,
    Nested(Shape),
    /// A content block: an object that its `type` gives a shape.
    Block,
}

/// What stands for a field that is not there.
#[derive(Clone, Copy)]
pub(crate) enum Missing {
    Required,
    Null,
    Zero,
    False,
    EmptyList,
    EmptyObject,
    Text(&'static str),
}

impl Field {
    pub(crate) const fn required(name: &'static str, kind: Kind) -> Self {
        Self { name, kind, missing: Missing::Required, nullable: false }
    }

    pub(crate) const fn nullable(name: &'static str, kind: Kind) -> Self {
        Self { name, kind, missing: Missing::Null, nullable: true }
    }

    pub(crate) const fn default(name: &'static str, kind: Kind, missing: Missing) -> Self {
        Self { name, kind, missing, nullable: false }
    }
}

/// Walks a value, remembering where it is and what was wrong.
pub(crate) struct Checker {
    pub loc: Vec<Json>,
    pub errors: Vec<FieldError>,
}

impl Checker {
    pub(crate) fn at(loc: &[Json]) -> Self {
        Self { loc: loc.to_vec(), errors: Vec::new() }
    }

    /// Records a mistake at the current place.
    pub(crate) fn wrong(&mut self, kind: &'static str, msg: impl Into<String>) {
        if self.errors.len() < ERRORS_MAX {
            self.errors.push(FieldError { loc: self.loc.clone(), msg: msg.into(), kind });
        }
    }

    /// Whether another mistake would still be told.
    pub(crate) fn has_room(&self) -> bool {
        self.errors.len() < ERRORS_MAX
    }

    /// Runs `check` one level deeper, at `step`.
    pub(crate) fn within<T>(&mut self, step: impl Into<Json>, check: impl FnOnce(&mut Self) -> T) -> T {
        self.loc.push(step.into());
        let checked = check(self);
        self.loc.pop();
        checked
    }

    /// `value` as an object of `shape`, defaults filled in; `None` if it is no object.
    pub(crate) fn object(&mut self, shape: Shape, value: &Json) -> Option<JsonMap> {
        let Json::Object(map) = value else {
            self.wrong("model_attributes_type", "Input should be a valid dictionary or object to extract fields from");
            return None;
        };
        let mut checked = JsonMap::new();
        for field in shape {
            let value = self.within(field.name, |checker| checker.field(field, map.get(field.name)));
            checked.insert(field.name.to_owned(), value);
        }
        Some(checked)
    }

    fn field(&mut self, field: &Field, value: Option<&Json>) -> Json {
        match (value, field.missing) {
            (Some(Json::Null), _) if field.nullable => Json::Null,
            (Some(value), _) => self.value(&field.kind, value),
            (None, Missing::Required) => {
                self.wrong("missing", "Field required");
                Json::Null
            }
            (None, Missing::Null) => Json::Null,
            (None, Missing::Zero) => 0.into(),
            (None, Missing::False) => false.into(),
            (None, Missing::EmptyList) => Json::Array(Vec::new()),
            (None, Missing::EmptyObject) => Json::Object(JsonMap::new()),
            (None, Missing::Text(text)) => text.into(),
        }
    }

    /// `value` as `kind`; null after a mistake, which is recorded.
    pub(crate) fn value(&mut self, kind: &Kind, value: &Json) -> Json {
        match kind {
            Kind::Any => return value.clone(),
            Kind::Text if value.is_string() => return value.clone(),
            Kind::Bool if value.is_boolean() => return value.clone(),
            Kind::Object if value.is_object() => return value.clone(),
            Kind::OneOf(words) if value.as_str().is_some_and(|text| words.contains(&text)) => return value.clone(),
            Kind::Int => return self.int(value),
            Kind::Number => return self.number(value),
            Kind::IntPair => return self.int_pair(value),
            Kind::Nested(shape) => return self.object(shape, value).map_or(Json::Null, Json::Object),
            Kind::Block => return super::blocks::check(self, value),
            Kind::List(item) => return self.list(item, value),
            Kind::Text => self.wrong("string_type", "Input should be a valid string"),
            Kind::Bool => self.wrong("bool_type", "Input should be a valid boolean"),
            Kind::Object => self.wrong("dict_type", "Input should be a valid dictionary"),
            Kind::OneOf(words) => self.wrong("literal_error", format!("Input should be {}", one_of(words))),
        }
        Json::Null
    }

    fn list(&mut self, item: &Kind, value: &Json) -> Json {
        match value {
            Json::Array(items) => {
                let checked = items
                    .iter()
                    .enumerate()
                    .map(|(index, value)| self.within(index, |checker| checker.value(item, value)));
                Json::Array(checked.collect())
            }
            Json::String(_) => {
                self.wrong("sequence_str", "'str' instances are not allowed as a Sequence value");
                Json::Null
            }
            _ => {
                self.wrong("list_type", "Input should be a valid list");
                Json::Null
            }
        }
    }

    fn int_pair(&mut self, value: &Json) -> Json {
        let pair = self.list(&Kind::Int, value);
        if pair.as_array().is_some_and(|items| items.len() != 2) {
            self.wrong("value_error", "Value error, a span is two integers");
        }
        pair
    }

    fn int(&mut self, value: &Json) -> Json {
        match value {
            Json::Number(number) if is_integer(number) => value.clone(),
            Json::Number(number) => match whole(&number.to_string()) {
                Some(whole) => whole,
                None => {
                    self.wrong(
                        "int_from_float",
                        "Input should be a valid integer, got a number with a fractional part",
                    );
                    Json::Null
                }
            },
            Json::String(text) => match text.trim().parse::<serde_json::Number>() {
                Ok(number) if is_integer(&number) => Json::Number(number),
                _ => {
                    let msg = "Input should be a valid integer, unable to parse string as an integer";
                    self.wrong("int_parsing", msg);
                    Json::Null
                }
            },
            _ => {
                self.wrong("int_type", "Input should be a valid integer");
                Json::Null
            }
        }
    }

    fn number(&mut self, value: &Json) -> Json {
        let number = match value {
            Json::Number(number) => Some(number.clone()),
            Json::String(text) => text.trim().parse().ok(),
            _ => {
                self.wrong("float_type", "Input should be a valid number");
                return Json::Null;
            }
        };
        match number {
            Some(number) if is_finite(&number) => Json::Number(number),
            Some(_) => {
                self.wrong("finite_number", "Input should be a finite number");
                Json::Null
            }
            None => {
                self.wrong("float_parsing", "Input should be a valid number, unable to parse string as a number");
                Json::Null
            }
        }
    }
}

/// The integer that `text` such as `3.0` spells.
fn whole(text: &str) -> Option<Json> {
    let (digits, fraction) = text.split_once('.')?;
    let zeros = fraction.bytes().all(|byte| byte == b'0');
    zeros.then(|| digits.parse().ok().map(Json::Number)).flatten()
}

fn is_finite(number: &serde_json::Number) -> bool {
    number.to_string().parse::<f64>().is_ok_and(f64::is_finite)
}

/// `'a', 'b' or 'c'`.
pub(crate) fn one_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}
