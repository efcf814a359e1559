//! The view of a look, and the effects of keys and the mouse on it. No input, no output.

use clap::ValueEnum;
use crossterm::event::{
    KeyCode, KeyEvent, KeyEventKind, KeyModifiers, MouseButton, MouseEvent, MouseEventKind,
};
use ratatui::crossterm;
use ratatui::layout::{Position, Rect};

use super::source::{History, Look, LookResult, Trace, lease_key};
use crate::names::Of;
use crate::shown::{Device, called, memory_used, order};
use crate::status::LeaseOnDevice;

/// The longest filter, in characters.
const LONGEST_FILTER: usize = 64;

/// The order of the containers. `s` goes from one to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    #[default]
    Memory,
    Busy,
    Name,
    Gpu,
    Age,
}

/// Where the cursor is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    Gpus,
    #[default]
    Containers,
}

/// The contents below the host's line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Body {
    #[default]
    Rows,
    /// Of what the cursor is on.
    Details,
    /// The keys.
    Help,
}

/// Where things were drawn, for the mouse.
#[derive(Clone, Debug, Default)]
pub struct Areas {
    /// The rows of each pane, and the number of the first that is shown.
    pub rows: [(Rect, usize); 2],
    /// The titles by which containers can be sorted.
    pub titles: Vec<(Rect, Sort)>,
    /// Lines of the details that are below their end.
    pub hidden: usize,
}

/// The state of the screen or the page.
#[derive(Debug, Default)]
pub struct View {
    pub look: Option<Look>,
    /// Whose containers are shown at all.
    pub of: Of,
    /// Why there is no newer look.
    pub error: Option<String>,
    pub history: History,
    pub sort: Sort,
    pub reverse: bool,
    pub filter: String,
    /// Whether keys are added to the filter.
    pub typing: bool,
    pub pane: Pane,
    pub body: Body,
    /// The first line of the details that is shown.
    pub scroll: usize,
    /// Whether the sparklines of each pane show the other of the traces.
    pub turned: [bool; 2],
    pub areas: Areas,
    /// The keys of the rows that the cursor is on, by pane.
    pub cursor: [Option<String>; 2],
}

impl View {
    /// Takes the next look.
    pub fn take(&mut self, result: LookResult) {
        match result {
            Ok(look) => {
                self.history.note(&look);
                (self.look, self.error) = (Some(look), None);
            }
            Err(error) => self.error = Some(error),
        }
    }

    /// GPUs, each with its MIG devices.
    pub fn devices(&self) -> Vec<Device<'_>> {
        self.look.iter().flat_map(|look| Device::all(&look.status.devices)).collect()
    }

    /// The values in the sparklines of `pane`.
    pub fn trace(&self, pane: Pane) -> Trace {
        if (pane == Pane::Gpus) == self.turned[pane as usize] { Trace::Memory } else { Trace::Load }
    }

    /// The containers that the filter lets through, sorted.
    pub fn containers(&self) -> Vec<&LeaseOnDevice> {
        let Some(look) = &self.look else { return Vec::new() };
        let status = &look.status;
        let wanted = self.filter.to_lowercase();
        let shown = |lease: &&LeaseOnDevice| {
            let number = status.number(&lease.device);
            let owner = lease.owner.as_ref().map(|owner| owner.name.clone());
            let texts = [&lease.name, &lease.image, &lease.part_of, &lease.unit, &owner];
            let texts = texts.into_iter().flatten().map(String::as_str);
            let ids = [&*lease.id, &lease.container_id, &lease.user, lease.mode.into(), &number];
            let is_found =
                || wanted.is_empty() || texts.chain(ids).any(|text| text.to_lowercase().contains(&wanted));
            self.of.has(&lease.user, lease.owner.as_ref()) && is_found()
        };
        let mut rows: Vec<&LeaseOnDevice> = status.leases.iter().filter(shown).collect();
        let share = |lease: &LeaseOnDevice| memory_used(lease, status).unwrap_or(-1.0);
        rows.sort_by_cached_key(|lease| (called(lease), lease.device.clone()));
        match self.sort {
            Sort::Memory => rows.sort_by(|a, b| share(b).total_cmp(&share(a))),
            Sort::Busy => rows.sort_by_key(|lease| std::cmp::Reverse(lease.used.sm_percent)),
            Sort::Name => {}
            Sort::Gpu => rows.sort_by_cached_key(|lease| order(&status.number(&lease.device))),
            Sort::Age => rows.sort_by_key(|lease| lease.taken),
        }
        if self.reverse {
            rows.reverse();
        }
        rows
    }

    /// The keys of the rows of `pane`.
    fn keys(&self, pane: Pane) -> Vec<String> {
        match pane {
            Pane::Gpus => self.devices().iter().map(|device| device.uuid.to_owned()).collect(),
            Pane::Containers => self.containers().into_iter().map(lease_key).collect(),
        }
    }

    /// The row of `pane` that the cursor is on; the first where the one it was on is gone.
    pub fn selected(&self, pane: Pane) -> usize {
        let Some(key) = &self.cursor[pane as usize] else { return 0 };
        self.keys(pane).iter().position(|other| other == key).unwrap_or(0)
    }

    fn select(&mut self, pane: Pane, row: usize) {
        let keys = self.keys(pane);
        self.cursor[pane as usize] = keys.get(row.min(keys.len().saturating_sub(1))).cloned();
    }

    fn go(&mut self, rows: isize) {
        if self.body == Body::Rows {
            self.select(self.pane, self.selected(self.pane).saturating_add_signed(rows));
        } else {
            self.scroll = self.scroll.saturating_add_signed(rows).min(self.scroll + self.areas.hidden);
        }
    }

    /// A key; whether the program goes on.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return true;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return false;
        }
        if self.typing {
            self.type_in(key.code);
            return true;
        }
        let at = self.pane as usize;
        let page = isize::from(i16::try_from(self.areas.rows[at].0.height.max(2)).unwrap_or(2)) - 1;
        match key.code {
            KeyCode::Char('q') => return false,
            KeyCode::Char('s') => {
                let all = Sort::value_variants();
                self.sort = all[(self.sort as usize + 1) % all.len()];
            }
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('m') => self.turned[at] = !self.turned[at],
            KeyCode::Char('/') => {
                (self.typing, self.body, self.pane) = (true, Body::Rows, Pane::Containers);
            }
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => {
                self.body = if self.body == Body::Help { Body::Rows } else { Body::Help };
                self.scroll = 0;
            }
            KeyCode::Esc => self.escape(),
            KeyCode::Enter => self.open(),
            KeyCode::Tab | KeyCode::BackTab => {
                self.pane = if self.pane == Pane::Gpus { Pane::Containers } else { Pane::Gpus };
                self.scroll = 0;
            }
            KeyCode::Up | KeyCode::Char('k') => self.go(-1),
            KeyCode::Down | KeyCode::Char('j') => self.go(1),
            KeyCode::PageUp => self.go(-page),
            KeyCode::PageDown | KeyCode::Char(' ') => self.go(page),
            KeyCode::Home | KeyCode::Char('g') => self.go(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.go(isize::MAX),
            _ => {}
        }
        true
    }

    fn type_in(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => (self.typing, self.filter) = (false, String::new()),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(character) if self.filter.chars().count() < LONGEST_FILTER => {
                self.filter.push(character);
            }
            _ => {}
        }
    }

    /// Goes back to the rows or, from there, clears the filter.
    fn escape(&mut self) {
        if self.body == Body::Rows {
            self.filter.clear();
        }
        (self.body, self.scroll) = (Body::Rows, 0);
    }

    fn open(&mut self) {
        if self.body != Body::Rows {
            return self.escape();
        }
        // The cursor stays with the row that is shown, whatever comes before it.
        self.select(self.pane, self.selected(self.pane));
        if self.cursor[self.pane as usize].is_some() {
            (self.body, self.scroll) = (Body::Details, 0);
        }
    }

    /// The mouse: a click selects a row, one more opens its details; a click on a title sorts.
    pub fn mouse(&mut self, event: MouseEvent) {
        match event.kind {
            MouseEventKind::ScrollUp => self.go(-3),
            MouseEventKind::ScrollDown => self.go(3),
            MouseEventKind::Down(MouseButton::Left) => self.click(Position::new(event.column, event.row)),
            _ => {}
        }
    }

    fn click(&mut self, at: Position) {
        if self.body == Body::Help || self.body == Body::Details && !self.areas.rows[0].0.contains(at) {
            return self.escape();
        }
        if let Some((_, sort)) = self.areas.titles.iter().find(|(title, _)| title.contains(at)).copied() {
            self.reverse = self.sort == sort && !self.reverse;
            self.sort = sort;
        }
        for pane in [Pane::Gpus, Pane::Containers] {
            let (area, first) = self.areas.rows[pane as usize];
            let row = first + usize::from(at.y.saturating_sub(area.y));
            if !area.contains(at) || row >= self.keys(pane).len() {
                continue;
            }
            let again = self.pane == pane && self.selected(pane) == row;
            self.pane = pane;
            self.select(pane, row);
            if again {
                self.open();
            }
        }
    }
}
