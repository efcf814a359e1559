//! `sublet top`: GPUs and containers, live. [`source`] looks at the host in a thread of its own, so that a driver that
//! hangs never stops the keys; [`view`] has what is shown, [`draw`] draws it, [`terminal`] is the rest. [`web`] shows
//! it as a page.

mod details;
mod draw;
#[cfg(test)]
mod fixture;
mod history;
mod rows;
mod skin;
mod source;
mod terminal;
#[cfg(test)]
mod tests;
mod view;
pub mod web;

use std::time::{Duration, Instant};

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use skin::Skin;
use sublet_core::config::Config;
use view::View;

pub use terminal::run;

/// Between the two looks of [`once`]: what GPM reports is what happened between them.
const BETWEEN: Duration = Duration::from_millis(250);

/// One frame of `width` columns as text, with all rows.
pub fn once(config: &Config, width: u16, utf8: bool) -> Result<String, String> {
    let mut view = View::default();
    let mut looks = 0;
    source::watch(config, BETWEEN, &mut |told| {
        view.take(told);
        looks += 1;
        looks < 2
    });
    if let Some(error) = view.error {
        return Err(error);
    }
    let warnings = view.look.as_ref().map_or(0, |look| look.status.warnings.len());
    let rows = view.devices().len() + view.containers().len() + warnings + 24;
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, u16::try_from(rows).unwrap_or(u16::MAX)));
    draw::draw_all(&view, Skin { utf8, colour: false }, Instant::now(), &mut buffer);
    Ok(text_of(&buffer).trim_end().to_owned() + "\n")
}

/// The characters of `buffer`, without blanks at the ends of lines.
fn text_of(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width.max(1));
    let line = |cells: &[ratatui::buffer::Cell]| {
        // The cell after a character of two columns is part of it.
        let mut skip = 0;
        let mut line = String::new();
        for cell in cells {
            if skip == 0 {
                line.push_str(cell.symbol());
                skip = ratatui::text::Span::raw(cell.symbol()).width().saturating_sub(1);
            } else {
                skip -= 1;
            }
        }
        line.trim_end().to_owned() + "\n"
    };
    buffer.content.chunks(width).map(line).collect()
}
