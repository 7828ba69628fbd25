//! Text with CEL in it: `You said {{ user_text }}`.

use crate::domain::Json;
use crate::graph::expression::{Expression, ExpressionError, Facts, Place};

/// Compiled text.
#[derive(Debug)]
pub struct Template {
    parts: Vec<Part>,
}

#[derive(Debug)]
enum Part {
    Text(String),
    Value(Expression),
}

impl Template {
    /// Compiles `text`; what stands between `{{` and `}}` is CEL.
    ///
    /// # Errors
    /// [`ExpressionError`], its place counted in `text`.
    pub fn compile(text: &str, fields: Option<&[String]>) -> Result<Self, ExpressionError> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{{") {
            let start = text.len() - after.len();
            let Some((inside, behind)) = after.split_once("}}") else {
                return Err(ExpressionError {
                    message: "'{{' has no '}}'".to_owned(),
                    fix: "close it".to_owned(),
                    at: Some(place_of(text, start - 2)),
                });
            };
            parts.push(Part::Text(before.to_owned()));
            let trimmed = inside.trim_start();
            let offset = start + inside.len() - trimmed.len();
            let value = Expression::compile(trimmed.trim_end(), Place::Node, fields);
            parts.push(Part::Value(value.map_err(|error| shifted(error, text, offset))?));
            rest = behind;
        }
        parts.push(Part::Text(rest.to_owned()));
        Ok(Self { parts })
    }

    /// The text, values that are no text as JSON.
    ///
    /// # Errors
    /// Why a value could not be had.
    pub fn render(&self, facts: &Facts<'_>) -> Result<String, String> {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Text(piece) => text.push_str(piece),
                Part::Value(expression) => match expression.evaluate(facts)? {
                    Json::String(value) => text.push_str(&value),
                    value => text.push_str(&value.to_string()),
                },
            }
        }
        Ok(text)
    }
}

fn place_of(text: &str, offset: usize) -> (usize, usize) {
    let before = &text[..offset];
    (before.matches('\n').count() + 1, before.chars().rev().take_while(|c| *c != '\n').count() + 1)
}

fn shifted(mut error: ExpressionError, text: &str, offset: usize) -> ExpressionError {
    let (line, column) = place_of(text, offset);
    error.at = error.at.map(|(at_line, at_column)| match at_line {
        1 => (line, column + at_column - 1),
        _ => (line + at_line - 1, at_column),
    });
    error
}
