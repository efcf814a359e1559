//! Rows of columns that fit into a width. The least important columns are left out, and one column takes the remaining
//! width.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::skin::Skin;

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    pub title: &'static str,
    /// In characters.
    pub width: u16,
    /// How soon it is left out; 0: never.
    pub rank: u8,
    /// As wide as it may become where there is room.
    pub most: u16,
}

impl Column {
    pub const fn new(title: &'static str, width: u16, rank: u8) -> Self {
        Self { title, width, rank, most: width }
    }

    pub const fn up_to(self, most: u16) -> Self {
        Self { most, ..self }
    }
}

/// The columns that are shown: the number of each, where it begins and how wide it is.
#[derive(Clone, Debug)]
pub struct Fitted(pub Vec<(usize, u16, u16)>);

/// The columns that fit into `width` with a blank between them. Remaining width goes to the first column that may grow,
/// then to the next.
pub fn fit(columns: &[Column], width: u16) -> Fitted {
    let mut kept: Vec<usize> = (0..columns.len()).collect();
    let total = |kept: &[usize]| {
        let widths: u16 = kept.iter().map(|&at| columns[at].width).sum();
        widths + u16::try_from(kept.len().saturating_sub(1)).unwrap_or(u16::MAX)
    };
    while total(&kept) > width {
        let least = kept.iter().copied().filter(|&at| columns[at].rank > 0);
        let Some(least) = least.max_by_key(|&at| columns[at].rank) else { break };
        kept.retain(|&at| at != least);
    }
    let mut left = width.saturating_sub(total(&kept));
    let mut x = 0;
    let place = |&at: &usize| {
        let more = left.min(columns[at].most - columns[at].width);
        left -= more;
        let placed = (at, x, columns[at].width + more);
        x += placed.2 + 1;
        placed
    };
    Fitted(kept.iter().map(place).collect())
}

impl Fitted {
    /// How wide column `number` is; 0 where it is left out.
    pub fn width(&self, number: usize) -> usize {
        self.0.iter().find(|(at, ..)| *at == number).map_or(0, |(_, _, width)| usize::from(*width))
    }

    /// Writes one row at the top of `area`.
    pub fn write(&self, cells: &[String], style: Style, area: Rect, skin: Skin, buffer: &mut Buffer) {
        if area.height == 0 {
            return;
        }
        buffer.set_style(Rect { height: 1, ..area }, style);
        for &(at, x, width) in &self.0 {
            let width = width.min(area.width.saturating_sub(x));
            if let (Some(cell), true) = (cells.get(at), width > 0) {
                skin.put(buffer, area.x + x, area.y, cell, usize::from(width), style);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_matters_least_goes_first_and_what_is_left_is_used() {
        let columns = [Column::new("A", 4, 0), Column::new("B", 6, 1), Column::new("C", 5, 2).up_to(20)];
        let fitted = |width| fit(&columns, width).0;
        assert_eq!(fitted(17), [(0, 0, 4), (1, 5, 6), (2, 12, 5)]);
        assert_eq!(fitted(30), [(0, 0, 4), (1, 5, 6), (2, 12, 18)]);
        assert_eq!(fitted(100), [(0, 0, 4), (1, 5, 6), (2, 12, 20)]);
        assert_eq!(fitted(16), [(0, 0, 4), (1, 5, 6)]);
        assert_eq!(fitted(3), [(0, 0, 4)], "what never goes is cut when it is written");
    }
}
