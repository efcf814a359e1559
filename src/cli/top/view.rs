//! What of a look is shown, and what keys and the mouse change about that. No input, no output.

use crossterm::event::{
    KeyCode, KeyEvent, KeyEventKind, KeyModifiers, MouseButton, MouseEvent, MouseEventKind,
};
use ratatui::crossterm;
use ratatui::layout::{Position, Rect};

use super::history::{History, Trace, fraction, lease_key, memory_of};
use super::source::{Look, Told};
use crate::shown::lease::called;
use crate::status::{Gpu, LeaseOnDevice, MigInstance};

/// The longest filter, in characters.
const LONGEST_FILTER: usize = 64;

/// The order of the containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    Memory,
    Load,
    Name,
    Gpu,
    Age,
}

impl Sort {
    const ALL: [Self; 5] = [Self::Memory, Self::Load, Self::Name, Self::Gpu, Self::Age];

    /// As it is shown.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Load => "busy",
            Self::Name => "name",
            Self::Gpu => "gpu",
            Self::Age => "age",
        }
    }

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|sort| *sort == self).unwrap_or_default();
        Self::ALL[(at + 1) % Self::ALL.len()]
    }
}

/// Where the cursor is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    Gpus,
    #[default]
    Containers,
}

/// What is below the host's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
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

/// What is shown.
#[derive(Debug)]
pub struct View {
    pub look: Option<Look>,
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
    /// What the sparklines of each pane show.
    pub traces: [Trace; 2],
    pub areas: Areas,
    /// The keys of the rows that the cursor is on, by pane.
    cursor: [Option<String>; 2],
}

/// A row of the upper pane.
#[derive(Clone, Copy, Debug)]
pub enum DeviceRow<'a> {
    Gpu(&'a Gpu),
    /// A MIG device, and whether it is the last of its GPU.
    Mig(&'a MigInstance, bool),
}

impl DeviceRow<'_> {
    pub fn uuid(&self) -> &str {
        match self {
            Self::Gpu(gpu) => &gpu.uuid,
            Self::Mig(part, _) => &part.uuid,
        }
    }
}

/// What becomes of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    Goes,
    Ends,
}

impl Default for View {
    fn default() -> Self {
        Self {
            look: None,
            error: None,
            history: History::default(),
            sort: Sort::Memory,
            reverse: false,
            filter: String::new(),
            typing: false,
            pane: Pane::default(),
            body: Body::Rows,
            scroll: 0,
            traces: [Trace::Load, Trace::Memory],
            areas: Areas::default(),
            cursor: [None, None],
        }
    }
}

impl View {
    /// Takes the next look.
    pub fn take(&mut self, told: Told) {
        match told {
            Ok(look) => {
                self.history.note(&look);
                (self.look, self.error) = (Some(look), None);
            }
            Err(error) => self.error = Some(error),
        }
    }

    /// GPUs, each with its MIG devices.
    pub fn devices(&self) -> Vec<DeviceRow<'_>> {
        let gpus = self.look.iter().flat_map(|look| &look.status.devices);
        let rows = gpus.flat_map(|gpu| {
            let last = gpu.mig.len().wrapping_sub(1);
            let parts = gpu.mig.iter().enumerate();
            std::iter::once(DeviceRow::Gpu(gpu))
                .chain(parts.map(move |(at, part)| DeviceRow::Mig(part, at == last)))
        });
        rows.collect()
    }

    /// The containers that the filter lets through, sorted.
    pub fn containers(&self) -> Vec<&LeaseOnDevice> {
        let Some(look) = &self.look else { return Vec::new() };
        let status = &look.status;
        let wanted = self.filter.to_lowercase();
        let shown = |lease: &&LeaseOnDevice| {
            let number = status.number(&lease.device);
            let texts = [&lease.name, &lease.image, &lease.part_of, &lease.unit];
            let texts = texts.into_iter().flatten().map(String::as_str);
            let ids = [&*lease.id, &lease.container_id, &lease.user, lease.mode.into(), &number];
            wanted.is_empty() || texts.chain(ids).any(|text| text.to_lowercase().contains(&wanted))
        };
        let mut rows: Vec<&LeaseOnDevice> = status.leases.iter().filter(shown).collect();
        let share = |lease: &LeaseOnDevice| {
            let memory = lease.used.memory_bytes.zip(memory_of(status, lease));
            memory.map_or(-1.0, |(used, whole)| fraction(used, whole))
        };
        rows.sort_by_cached_key(|lease| (called(lease), lease.device.clone()));
        match self.sort {
            Sort::Memory => rows.sort_by(|a, b| share(b).total_cmp(&share(a))),
            Sort::Load => rows.sort_by_key(|lease| std::cmp::Reverse(lease.used.sm_percent)),
            Sort::Name => {}
            Sort::Gpu => rows.sort_by_cached_key(|lease| number(&status.number(&lease.device))),
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
            Pane::Gpus => self.devices().iter().map(|row| row.uuid().to_owned()).collect(),
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
            let most = self.scroll + self.areas.hidden;
            self.scroll = self.scroll.saturating_add_signed(rows).min(most);
        }
    }

    /// A key.
    pub fn key(&mut self, key: KeyEvent) -> After {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if key.kind == KeyEventKind::Release {
            return After::Goes;
        }
        if control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return After::Ends;
        }
        if self.typing {
            self.type_in(key.code);
            return After::Goes;
        }
        let page =
            isize::from(i16::try_from(self.areas.rows[self.pane as usize].0.height.max(2)).unwrap_or(2)) - 1;
        match key.code {
            KeyCode::Char('q') => return After::Ends,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('m') => {
                let trace = &mut self.traces[self.pane as usize];
                *trace = if *trace == Trace::Load { Trace::Memory } else { Trace::Load };
            }
            KeyCode::Char('/') => {
                (self.typing, self.body, self.pane) = (true, Body::Rows, Pane::Containers);
            }
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help(),
            KeyCode::Esc => self.escape(),
            KeyCode::Enter => self.open(),
            KeyCode::Tab | KeyCode::BackTab => self.turn(),
            KeyCode::Up | KeyCode::Char('k') => self.go(-1),
            KeyCode::Down | KeyCode::Char('j') => self.go(1),
            KeyCode::PageUp => self.go(-page),
            KeyCode::PageDown | KeyCode::Char(' ') => self.go(page),
            KeyCode::Home | KeyCode::Char('g') => self.go(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.go(isize::MAX),
            _ => {}
        }
        After::Goes
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

    /// Closes what is open last.
    fn escape(&mut self) {
        if self.body == Body::Rows {
            self.filter.clear();
        }
        (self.body, self.scroll) = (Body::Rows, 0);
    }

    fn help(&mut self) {
        self.body = if self.body == Body::Help { Body::Rows } else { Body::Help };
        self.scroll = 0;
    }

    fn open(&mut self) {
        if self.body != Body::Rows {
            return self.escape();
        }
        // The cursor stays with what is shown, whatever comes before it.
        self.select(self.pane, self.selected(self.pane));
        if self.cursor[self.pane as usize].is_some() {
            (self.body, self.scroll) = (Body::Details, 0);
        }
    }

    fn turn(&mut self) {
        self.pane = if self.pane == Pane::Gpus { Pane::Containers } else { Pane::Gpus };
        self.scroll = 0;
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

/// `0:10` comes after `0:2`.
fn number(text: &str) -> (u32, u32) {
    let parse = |part: Option<&str>| part.and_then(|part| part.parse().ok()).unwrap_or(0);
    let mut parts = text.split(':');
    (parse(parts.next()), parse(parts.next()))
}
