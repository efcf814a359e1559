//! YAML as a tree that knows its lines: mig-parted's files, Compose files.

use std::collections::BTreeSet;

use saphyr_parser::{Event, Parser};

use sublet_core::text::safe;

/// Documents that are nested deeper are attacks.
const DEEPEST: usize = 16;

/// A line, and the fault in it.
pub type Wrong = (usize, String);

/// A YAML value and the line it begins in.
#[derive(Debug)]
pub struct Node {
    pub line: usize,
    pub value: Value,
}

#[derive(Debug)]
pub enum Value {
    Scalar(String),
    List(Vec<Node>),
    Map(Vec<(Node, Node)>),
    /// `*name`: another part of the document. Nothing here looks it up.
    Alias,
}

impl Node {
    pub fn wrong(&self, message: String) -> Wrong {
        (self.line, message)
    }

    fn unlike(&self, wanted: &str) -> Wrong {
        self.wrong(match self.value {
            Value::Alias => "YAML aliases are not supported: write the value out".to_owned(),
            _ => format!("must be {wanted}"),
        })
    }

    pub fn scalar(&self, wanted: &str) -> Result<&str, Wrong> {
        let Value::Scalar(text) = &self.value else { return Err(self.unlike(wanted)) };
        Ok(text)
    }

    pub fn number(&self, wanted: &str) -> Result<usize, Wrong> {
        let text = self.scalar(wanted)?;
        text.parse().map_err(|_| self.wrong(format!("{}: must be {wanted}, a whole number", safe(text))))
    }

    pub fn list(&self, wanted: &str) -> Result<&[Node], Wrong> {
        let Value::List(list) = &self.value else { return Err(self.unlike(wanted)) };
        Ok(list)
    }

    /// The pairs of a map; a duplicate key is an error.
    pub fn map(&self, wanted: &str) -> Result<&[(Self, Self)], Wrong> {
        let Value::Map(pairs) = &self.value else { return Err(self.unlike(wanted)) };
        let mut known = BTreeSet::new();
        for (key, _) in pairs {
            let name = key.scalar("a key")?;
            if !known.insert(name) {
                return Err(key.wrong(format!("{} stands twice", safe(name))));
            }
        }
        Ok(pairs)
    }
}

/// The single document in `text`.
pub fn tree(text: &str) -> Result<Node, Wrong> {
    // The collections that are not closed yet: the line in which each begins, and its contents.
    let mut open: Vec<(usize, Vec<Node>)> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) =
            event.map_err(|error| (error.marker().line(), format!("no YAML: {}", safe(error.info()))))?;
        let line = span.start.line();
        let done = match event {
            Event::Scalar(text, ..) => Some(Node { line, value: Value::Scalar(text.into_owned()) }),
            Event::Alias(_) => Some(Node { line, value: Value::Alias }),
            Event::SequenceStart(..) | Event::MappingStart(..) if open.len() >= DEEPEST => {
                return Err((line, "it is nested too deeply".to_owned()));
            }
            Event::SequenceStart(..) | Event::MappingStart(..) => {
                open.push((line, Vec::new()));
                None
            }
            Event::SequenceEnd => open.pop().map(|(line, list)| Node { line, value: Value::List(list) }),
            Event::MappingEnd => open.pop().map(|(line, children)| {
                let mut children = children.into_iter();
                let pairs = std::iter::from_fn(|| children.next().zip(children.next()));
                Node { line, value: Value::Map(pairs.collect()) }
            }),
            _ => None,
        };
        let Some(done) = done else { continue };
        match open.last_mut() {
            Some((_, children)) => children.push(done),
            None => return Ok(done),
        }
    }
    Err((1, "the file is empty".to_owned()))
}
