//! Draws a view: from the top a line about the host, warnings, the GPUs, the containers or details, and the keys. Where
//! there is little room, the containers keep theirs longest.

use std::time::{Duration, Instant};

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::rows::{
    self, CURSOR, Column, DEVICE_COLUMNS, Fitted, LEASE_COLUMNS, LEASE_SORTS, MODE, OWNER, STATE, Skin,
    TITLE, fit, with_trace,
};
use super::source::lease_key;
use super::view::{Areas, Body, Pane, View};
use crate::shown::{Device, Words, name_of, word};
use sublet_core::text::{LONGEST_NAME, safe};

/// A look that is older than this beyond its interval is called old.
const LATE: Duration = Duration::from_secs(3);

/// Lines of warnings that are shown at most.
const WARNINGS: usize = 3;

const HELP: &[&str] = &[
    "q, Ctrl-C     end",
    "up down j k   move the cursor; also PgUp, PgDn, Home, End, the wheel",
    "Tab           between the GPUs and the containers",
    "Enter, click  details of what the cursor is on; once more closes them",
    "s             sort by memory, busy, name, gpu, age; a click on a title, too",
    "r             the other way round",
    "/             filter by name, image, user, owner, mode, GPU or id; Esc ends it",
    "m             sparklines: what is computed, or memory",
    "?, h          these keys",
    "",
    "A sparkline's characters are 5 seconds each, the newest at the end.",
    "n/a of 77 %   the MPS server computes 77 %; the driver does not tell its containers apart",
    "-             the driver does not tell, or not this user",
];

/// Draws `view` into `buffer`. Returns where things are.
pub fn draw(view: &View, skin: Skin, interval: Duration, now: Instant, buffer: &mut Buffer) -> Areas {
    let area = buffer.area;
    let mut page = Page { view, skin, buffer, left: area, areas: Areas::default() };
    if area.is_empty() {
        return page.areas;
    }
    page.header();
    if area.height >= 8 {
        page.footer();
    }
    let room = match page.left.height {
        0..8 => 0,
        8..16 => 1,
        _ => WARNINGS,
    };
    page.warnings(interval, now, room);
    page.body();
    page.areas
}

/// Draws all rows of `view`, and no keys: for text that nobody can scroll.
pub fn draw_all(view: &View, skin: Skin, now: Instant, buffer: &mut Buffer) {
    let area = buffer.area;
    let mut page = Page { view, skin, buffer, left: area, areas: Areas::default() };
    page.header();
    page.warnings(Duration::MAX, now, usize::MAX);
    page.body();
}

/// The cells of a row with a sparkline of this width, and how full it is.
type Row<'a> = dyn Fn(usize, usize) -> (Vec<String>, Option<f64>) + 'a;

struct Page<'a> {
    view: &'a View,
    skin: Skin,
    buffer: &'a mut Buffer,
    /// The area that is not drawn on yet.
    left: Rect,
    areas: Areas,
}

impl Page<'_> {
    /// Takes the top `height` lines of the area that is left.
    fn take(&mut self, height: u16) -> Rect {
        let height = height.min(self.left.height);
        let taken = Rect { height, ..self.left };
        self.left = Rect { y: self.left.y + height, height: self.left.height - height, ..self.left };
        taken
    }

    fn line(&mut self, text: &str, style: Style) {
        let area = self.take(1);
        if area.height > 0 {
            self.skin.put(self.buffer, area.x, area.y, text, usize::from(area.width), style);
        }
    }

    fn header(&mut self) {
        let Some(look) = &self.view.look else {
            return self.line("sublet top: looking for the driver", TITLE);
        };
        let status = &look.status;
        let simulated = if status.driver.simulated { " SIMULATED" } else { "" };
        let time = status.time.get(11..19).unwrap_or_default();
        let count = |number: usize, of: &str| format!("{number} {of}{}", if number == 1 { "" } else { "s" });
        let guard = status.guard.words();
        let (gpus, leases) = (count(status.devices.len(), "GPU"), count(status.leases.len(), "lease"));
        let version = safe(&status.driver.version);
        self.line(&format!("{time} UTC  {gpus}, {leases}  {guard}  driver {version}{simulated}"), TITLE);
    }

    fn footer(&mut self) {
        let y = self.left.bottom() - 1;
        let view = self.view;
        let text = match () {
            () if view.typing => format!("filter: {}_   Enter keeps it, Esc ends it", safe(&view.filter)),
            () if view.body != Body::Rows => "Esc back  up/down scroll  q end".to_owned(),
            () => {
                let order = if view.reverse { ", reversed" } else { "" };
                let colon = if view.filter.is_empty() { "" } else { ": " };
                let (sort, filter) = (name_of(&view.sort), safe(&view.filter));
                format!(
                    "q end  ? keys  s sort: {sort}{order}  / filter{colon}{filter}  Enter details  Tab GPUs"
                )
            }
        };
        let area = Rect { y, height: 1, ..self.left };
        self.buffer.set_style(area, self.skin.faint());
        self.skin.put(self.buffer, area.x, y, &text, usize::from(area.width), self.skin.faint());
        self.left.height -= 1;
    }

    /// First the fault of the look itself.
    fn warnings(&mut self, interval: Duration, now: Instant, room: usize) {
        let mut lines: Vec<String> = Vec::new();
        if let Some(error) = &self.view.error {
            lines.push(format!("what is below is old: {}", safe(error)));
        }
        if let Some(look) = &self.view.look {
            let age = now.saturating_duration_since(look.at);
            if age > interval.saturating_add(LATE) && self.view.error.is_none() {
                lines.push(format!("what is below is {} s old: the driver does not answer", age.as_secs()));
            }
            lines.extend(look.status.warnings.iter().cloned());
        }
        let own = usize::from(self.view.error.is_some());
        let room = room.max(own.min(usize::from(self.left.height)));
        let broken = crate::terminal::wrapped(&lines.join("\n"), Some(usize::from(self.left.width)));
        let more = lines.len().saturating_sub(room);
        let rest = format!("and {} more: `sublet status`", more + 1);
        // Where whole warnings find no room, each has a line.
        let is_whole = broken.lines().count() <= room;
        let mut lines: Vec<&str> =
            if is_whole { broken.lines().collect() } else { lines.iter().map(String::as_str).collect() };
        if more > 0 && room > 1 {
            lines.truncate(room - 1);
            lines.push(&rest);
        }
        for line in lines.into_iter().take(room) {
            self.line(line, self.skin.warning());
        }
    }

    fn body(&mut self) {
        let view = self.view;
        match view.body {
            Body::Help => self.text(HELP),
            Body::Details => {
                self.devices(self.left.height / 3);
                self.text(&rows::details(view, usize::from(self.left.width), self.skin));
            }
            Body::Rows => {
                let containers = u16::try_from(view.containers().len()).unwrap_or(u16::MAX).saturating_add(1);
                let half = self.left.height.div_ceil(2);
                self.devices(half.max(self.left.height.saturating_sub(containers.saturating_add(1))));
                self.containers();
            }
        }
    }

    fn devices(&mut self, most: u16) {
        let (view, skin, trace) = (self.view, self.skin, self.view.trace(Pane::Gpus));
        let devices = view.devices();
        let row = |at: usize, width: usize| {
            let device = &devices[at];
            let spark = view.history.sparkline(device.uuid, trace, width, skin.utf8);
            (rows::device(device, spark, skin), device.memory_used())
        };
        let area = self.take(u16::try_from(devices.len()).unwrap_or(u16::MAX).saturating_add(1).min(most));
        let mut columns = with_trace(DEVICE_COLUMNS, trace);
        columns[MODE] = columns[MODE].for_words(devices.iter().map(Device::state));
        self.table(Pane::Gpus, area, &columns, devices.len(), &row);
        if self.left.height > 4 {
            self.take(1);
        }
    }

    fn containers(&mut self) {
        let (view, skin, trace) = (self.view, self.skin, self.view.trace(Pane::Containers));
        let Some(look) = &view.look else { return };
        let containers = view.containers();
        if containers.is_empty() {
            let none =
                if look.status.leases.is_empty() { "No leases." } else { "No lease matches the filter." };
            return self.line(none, skin.faint());
        }
        let row = |at: usize, width: usize| {
            let words = Words::of(containers[at], &look.status, LONGEST_NAME);
            let full = words.memory_used;
            let spark = view.history.sparkline(&lease_key(containers[at]), trace, width, skin.utf8);
            (rows::container(words, spark, skin), full)
        };
        let area = self.take(self.left.height);
        let mut columns = with_trace(LEASE_COLUMNS, trace);
        columns[STATE] = columns[STATE].for_words(containers.iter().map(|lease| word(&lease.state)));
        columns[OWNER].width *= u16::from(containers.iter().any(|lease| lease.owner.is_some()));
        let fitted = self.table(Pane::Containers, area, &columns, containers.len(), &row);
        for &(at, x, width) in &fitted.0 {
            if let Some((_, sort)) = LEASE_SORTS.iter().find(|(column, _)| *column == at) {
                self.areas.titles.push((Rect { x: area.x + x, width, height: 1, ..area }, *sort));
            }
        }
    }

    /// A title and as many of `count` rows as fit, among them the one that the cursor is on. `row` returns the cells of
    /// one, and how full it is.
    fn table(&mut self, pane: Pane, area: Rect, columns: &[Column], count: usize, row: &Row<'_>) -> Fitted {
        let (view, skin) = (self.view, self.skin);
        let fitted = fit(columns, area.width);
        if area.is_empty() {
            return fitted;
        }
        // A single line is the row that the cursor is on.
        let has_title = area.height > 1;
        if has_title {
            let titles: Vec<String> = columns.iter().map(|column| column.title.to_owned()).collect();
            fitted.write(&titles, TITLE, area, skin, self.buffer);
        }
        let title = u16::from(has_title);
        let body = Rect { y: area.y + title, height: area.height - title, ..area };
        let room = usize::from(body.height);
        let selected = view.selected(pane);
        let first = (selected + 1).saturating_sub(room).min(count.saturating_sub(room));
        self.areas.rows[pane as usize] = (body, first);
        for (at, y) in (first..count).zip(body.top()..body.bottom()) {
            let (cells, full) = row(at, fitted.width(columns.len() - 1));
            let is_here = pane == view.pane && at == selected;
            let style = if is_here { skin.part(full).patch(CURSOR) } else { skin.part(full) };
            fitted.write(&cells, style, Rect { y, height: 1, ..body }, skin, self.buffer);
        }
        fitted
    }

    /// Lines that can be scrolled.
    fn text(&mut self, lines: &[impl AsRef<str>]) {
        let room = usize::from(self.left.height);
        let first = self.view.scroll.min(lines.len().saturating_sub(room));
        self.areas.hidden = lines.len().saturating_sub(first + room);
        for line in lines.iter().skip(first).take(room).map(AsRef::as_ref) {
            let is_title = line.starts_with(|c: char| c.is_uppercase()) && !line.contains("  ");
            self.line(line, if is_title { TITLE } else { Style::new() });
        }
    }
}
