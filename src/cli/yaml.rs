//! YAML as a tree that knows its lines: mig-parted's files, Compose files.

use saphyr_parser::{Event, Parser};

use sublet_core::text::safe;

/// Documents that are nested deeper are attacks.
const DEEPEST: usize = 16;

/// A line, and what is wrong there.
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
        match &self.value {
            Value::Scalar(text) => Ok(text),
            _ => Err(self.unlike(wanted)),
        }
    }

    pub fn number(&self, wanted: &str) -> Result<usize, Wrong> {
        let text = self.scalar(wanted)?;
        text.parse().map_err(|_| self.wrong(format!("{}: must be {wanted}, a whole number", safe(text))))
    }

    pub fn list(&self, wanted: &str) -> Result<&[Node], Wrong> {
        match &self.value {
            Value::List(list) => Ok(list),
            _ => Err(self.unlike(wanted)),
        }
    }

    /// The pairs of a map; a duplicate key is an error.
    pub fn map(&self, wanted: &str) -> Result<&[(Self, Self)], Wrong> {
        let Value::Map(pairs) = &self.value else { return Err(self.unlike(wanted)) };
        for (at, (key, _)) in pairs.iter().enumerate() {
            let name = key.scalar("a key")?;
            if pairs[..at]
                .iter()
                .any(|(known, _)| matches!(&known.value, Value::Scalar(text) if text == name))
            {
                return Err(key.wrong(format!("{} stands twice", safe(name))));
            }
        }
        Ok(pairs)
    }
}

/// The single document in `text`.
pub fn tree(text: &str) -> Result<Node, Wrong> {
    let mut open: Vec<(Node, Vec<Node>)> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) =
            event.map_err(|error| (error.marker().line(), format!("no YAML: {}", safe(error.info()))))?;
        let line = span.start.line();
        let node = |value| Node { line, value };
        let done = match event {
            Event::Scalar(text, ..) => Some(node(Value::Scalar(text.into_owned()))),
            Event::SequenceStart(..) => opened(&mut open, node(Value::List(Vec::new())))?,
            Event::MappingStart(..) => opened(&mut open, node(Value::Map(Vec::new())))?,
            Event::SequenceEnd | Event::MappingEnd => open.pop().map(closed),
            Event::Alias(_) => Some(node(Value::Alias)),
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

fn opened(open: &mut Vec<(Node, Vec<Node>)>, node: Node) -> Result<Option<Node>, Wrong> {
    if open.len() >= DEEPEST {
        return Err((node.line, "it is nested too deeply".to_owned()));
    }
    open.push((node, Vec::new()));
    Ok(None)
}

fn closed((node, children): (Node, Vec<Node>)) -> Node {
    let value = match node.value {
        Value::Map(_) => {
            let mut pairs = Vec::new();
            let mut children = children.into_iter();
            while let (Some(key), Some(value)) = (children.next(), children.next()) {
                pairs.push((key, value));
            }
            Value::Map(pairs)
        }
        Value::List(_) => Value::List(children),
        whole @ (Value::Scalar(_) | Value::Alias) => whole,
    };
    Node { value, ..node }
}
