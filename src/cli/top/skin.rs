//! What a terminal can show: UTF-8 or not, colour or not.

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier, Style};

use crate::shown::{colour, utf8};

/// Titles.
pub const TITLE: Style = Style::new().add_modifier(Modifier::BOLD);

/// The row that the cursor is on.
pub const CURSOR: Style = Style::new().add_modifier(Modifier::REVERSED);

/// What a terminal can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skin {
    pub utf8: bool,
    pub colour: bool,
}

impl Skin {
    /// That of the user's terminal.
    pub fn of_terminal() -> Self {
        Self { utf8: utf8(), colour: colour() }
    }

    /// Writes `text` into at most `width` columns. What the terminal cannot show becomes `?`.
    pub fn put(self, buffer: &mut Buffer, x: u16, y: u16, text: &str, width: usize, style: Style) {
        if !buffer.area.contains((x, y).into()) {
            return;
        }
        let shown = |c: char| if self.utf8 || c.is_ascii() { c } else { '?' };
        buffer.set_stringn(x, y, text.chars().map(shown).collect::<String>(), width, style);
    }

    /// What needs attention.
    pub fn warning(self) -> Style {
        if self.colour { Style::new().fg(Color::Yellow) } else { Style::new().add_modifier(Modifier::BOLD) }
    }

    /// What stands in the background.
    pub fn faint(self) -> Style {
        if self.colour { Style::new().add_modifier(Modifier::DIM) } else { Style::new() }
    }

    /// Of what is used up to this part of 1.
    pub fn part(self, part: Option<f64>) -> Style {
        match part {
            Some(part) if self.colour && part >= 0.95 => Style::new().fg(Color::Red),
            Some(part) if self.colour && part >= 0.8 => Style::new().fg(Color::Yellow),
            _ => Style::new(),
        }
    }
}
