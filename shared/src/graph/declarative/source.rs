//! YAML and JSON text as JSON, with the place of every value: what messages point at.

use std::collections::HashMap;

use granit_parser::{Event, Parser, ScalarStyle, Span};

use super::finding::{Finding, Place};
use crate::domain::{Json, JsonMap};

/// The largest document, in bytes.
pub const DOCUMENT_BYTES_MAX: usize = 1024 * 1024;

/// How deep a document may nest.
const DEPTH_MAX: usize = 64;

/// A document with the places of its values.
#[derive(Debug, Default)]
pub(super) struct Source {
    pub json: Json,
    /// JSON pointer → where the value begins.
    values: HashMap<String, Place>,
    /// JSON pointer → where the key of the value begins.
    keys: HashMap<String, Place>,
    /// Pointers of texts that stand in one line, so that columns inside them can be counted.
    inline: HashMap<String, Place>,
}

impl Source {
    /// Reads `text`; mistakes that make it no document are found here, doubled keys too.
    pub(super) fn read(text: &str) -> (Self, Vec<Finding>) {
        let mut source = Self::default();
        if text.len() > DOCUMENT_BYTES_MAX {
            let message = format!("the document has {} bytes; at most {DOCUMENT_BYTES_MAX} are read", text.len());
            return (source, vec![Finding::error(Place::START, message, "split the graph")]);
        }
        let options = granit_parser::options! { emit_comments: false };
        let parser = Parser::new_from_str_with_options(text, options);
        let mut reader = Reader { parser, source: &mut source, findings: Vec::new() };
        let read = reader.document();
        let mut findings = reader.findings;
        match read {
            Ok(json) => source.json = json,
            Err(finding) => findings.push(finding),
        }
        (source, findings)
    }

    /// Where the value at `pointer` is, or else the nearest one around it.
    pub(super) fn place(&self, pointer: &str) -> Place {
        self.nearest(pointer, &self.values)
    }

    /// Where the key of the value at `pointer` is, or else the value itself or the nearest one
    /// around it.
    pub(super) fn key_place(&self, pointer: &str) -> Place {
        self.keys.get(pointer).copied().unwrap_or_else(|| self.place(pointer))
    }

    /// Where `line` and `column` of the text at `pointer` are, both from 1.
    pub(super) fn inside(&self, pointer: &str, at: Option<(usize, usize)>) -> Place {
        match (self.inline.get(pointer), at) {
            (Some(place), Some((1, column))) => Place { column: place.column + column - 1, ..*place },
            _ => self.place(pointer),
        }
    }

    fn nearest(&self, pointer: &str, places: &HashMap<String, Place>) -> Place {
        let mut pointer = pointer;
        loop {
            if let Some(place) = places.get(pointer) {
                return *place;
            }
            match pointer.rfind('/') {
                Some(end) => pointer = &pointer[..end],
                None => return Place::START,
            }
        }
    }
}

/// `name` as a step of a JSON pointer.
pub(super) fn step(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

struct Reader<'t, 's> {
    parser: Parser<'t, granit_parser::StrInput<'t>>,
    source: &'s mut Source,
    findings: Vec<Finding>,
}

impl<'t> Reader<'t, '_> {
    fn document(&mut self) -> Result<Json, Finding> {
        let mut json = Json::Null;
        let mut documents = 0;
        loop {
            let (event, span) = self.next()?;
            match event {
                Event::StreamEnd => return Ok(json),
                Event::StreamStart | Event::DocumentEnd => {}
                Event::DocumentStart(..) if documents == 1 => {
                    let message = "the file holds a second document";
                    return Err(Finding::error(place(&span), message, "put it into a file of its own"));
                }
                Event::DocumentStart(..) => documents += 1,
                event => json = self.value("", event, &span, 1)?,
            }
        }
    }

    fn next(&mut self) -> Result<(Event<'t>, Span), Finding> {
        self.parser.next_event().unwrap_or_else(|| Ok((Event::StreamEnd, Span::default()))).map_err(|error| {
            let at = Place { line: error.marker().line(), column: error.marker().col() + 1 };
            let message = format!("this is neither YAML nor JSON: {}", error.info());
            Finding::error(at, message, "correct the syntax; check indentation and quotes")
        })
    }

    fn value(&mut self, pointer: &str, event: Event<'t>, span: &Span, depth: usize) -> Result<Json, Finding> {
        let at = place(span);
        if depth > DEPTH_MAX {
            return Err(Finding::error(at, format!("this nests deeper than {DEPTH_MAX} levels"), "flatten it"));
        }
        self.source.values.insert(pointer.to_owned(), at);
        if event.anchor_id().is_some() || event.is_alias() {
            let message = "anchors and aliases are not read";
            return Err(Finding::error(at, message, "write the value out where it is needed"));
        }
        match event {
            Event::Scalar(text, style, ..) => {
                self.note_inline(pointer, &text, style, span);
                Ok(scalar(&text, style))
            }
            Event::SequenceStart(..) => self.sequence(pointer, depth),
            Event::MappingStart(..) => self.mapping(pointer, depth),
            _ => Err(Finding::error(at, "a value is missing here", "write one")),
        }
    }

    fn sequence(&mut self, pointer: &str, depth: usize) -> Result<Json, Finding> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(Json::Array(items)),
                (event, span) => {
                    let pointer = format!("{pointer}/{}", items.len());
                    items.push(self.value(&pointer, event, &span, depth + 1)?);
                }
            }
        }
    }

    fn mapping(&mut self, pointer: &str, depth: usize) -> Result<Json, Finding> {
        let mut map = JsonMap::new();
        loop {
            let (event, span) = self.next()?;
            let at = place(&span);
            let key = match event {
                Event::MappingEnd => return Ok(Json::Object(map)),
                Event::Scalar(key, ..) => key.into_owned(),
                _ => return Err(Finding::error(at, "a key must be text", "quote it, or correct the indentation")),
            };
            let inner = format!("{pointer}/{}", step(&key));
            let (event, span) = self.next()?;
            if map.contains_key(&key) {
                let first = self.source.key_place(&inner);
                let message = format!("'{key}' is here twice; the first is in line {}", first.line);
                self.findings.push(Finding::error(at, message, "rename or remove one"));
                let mut aside = Source::default();
                std::mem::swap(self.source, &mut aside);
                let skipped = self.value(&inner, event, &span, depth + 1);
                std::mem::swap(self.source, &mut aside);
                skipped?;
                continue;
            }
            self.source.keys.insert(inner.clone(), at);
            let value = self.value(&inner, event, &span, depth + 1)?;
            map.insert(key, value);
        }
    }

    fn note_inline(&mut self, pointer: &str, text: &str, style: ScalarStyle, span: &Span) {
        let is_plain = style == ScalarStyle::Plain;
        let is_quoted = matches!(style, ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted);
        if (is_plain || is_quoted) && span.start.line() == span.end.line() && !text.contains('\n') {
            let place = place(span);
            let column = place.column + usize::from(is_quoted);
            self.source.inline.insert(pointer.to_owned(), Place { column, ..place });
        }
    }
}

fn place(span: &Span) -> Place {
    Place { line: span.start.line(), column: span.start.col() + 1 }
}

/// A plain scalar is null, true, false or a JSON number, digits kept, where it looks like one;
/// everything else is text.
fn scalar(text: &str, style: ScalarStyle) -> Json {
    if style != ScalarStyle::Plain {
        return text.into();
    }
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Json::Null,
        "true" | "True" | "TRUE" => true.into(),
        "false" | "False" | "FALSE" => false.into(),
        _ if text.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => {
            text.parse().map_or_else(|_| text.into(), Json::Number)
        }
        _ => text.into(),
    }
}
