//! The last minutes of each device and each container, for sparklines. Times are of the monotonic clock: a clock that
//! is set back changes nothing here.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::source::Look;
use crate::shown::{Device, memory_used};
use crate::status::LeaseOnDevice;

/// The time that one character of a sparkline stands for.
const CELL: Duration = Duration::from_secs(5);

/// How many of them are kept: ten minutes.
const KEPT: usize = 120;

/// Marks from least to most, and one for a time of which nothing is known.
const MARKS: [([char; 8], char); 2] =
    [(['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'], '·'), (['_', '.', ':', '-', '=', '+', '*', '#'], ' ')];

/// What a sparkline shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// What is computed.
    Load,
    /// Memory in use.
    Memory,
}

/// Mean values, each a part of 1, of one device or container, by [`Trace`].
#[derive(Debug, Default)]
struct Past {
    cells: VecDeque<[Option<f32>; 2]>,
    sums: [(f32, u16); 2],
}

/// By a device's UUID and by [`lease_key`].
#[derive(Debug, Default)]
pub struct History {
    began: Option<Instant>,
    /// Cells that are over.
    over: u64,
    past: BTreeMap<String, Past>,
}

/// The key of a container on a device.
pub fn lease_key(lease: &LeaseOnDevice) -> String {
    format!("{} {}", lease.id, lease.device)
}

impl History {
    /// Adds `look`. Devices and containers that are gone are forgotten.
    pub fn note(&mut self, look: &Look) {
        let began = *self.began.get_or_insert(look.at);
        let now = u64::try_from(look.at.duration_since(began).as_millis() / CELL.as_millis()).unwrap_or(0);
        for _ in self.over..now.min(self.over + KEPT as u64) {
            self.past.values_mut().for_each(Past::turn);
        }
        self.over = now;
        let mut before = std::mem::take(&mut self.past);
        let mut note = |key: String, values: [Option<f64>; 2]| {
            let mut past = before.remove(&key).unwrap_or_default();
            past.add(values);
            self.past.insert(key, past);
        };
        for device in Device::all(&look.status.devices) {
            let load = device.load().map(|percent| percent / 100.0);
            note(device.uuid.to_owned(), [load, device.memory_used()]);
        }
        for lease in &look.status.leases {
            let load = lease.used.sm_percent.map(|percent| f64::from(percent) / 100.0);
            note(lease_key(lease), [load, memory_used(lease, &look.status)]);
        }
    }

    /// The latest `width` cells of `key`, the newest at the end.
    pub fn sparkline(&self, key: &str, trace: Trace, width: usize, utf8: bool) -> String {
        let (marks, unknown) = MARKS[usize::from(!utf8)];
        let Some(past) = self.past.get(key) else { return String::new() };
        let mark = |part: Option<f32>| part.map_or(unknown, |part| marks[level(part)]);
        let cells: Vec<char> = past.cells(trace).map(mark).collect();
        cells[cells.len().saturating_sub(width)..].iter().collect()
    }

    /// The latest `most` values of `key` in percent, the newest at the end.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 100")]
    pub fn past(&self, key: &str, trace: Trace, most: usize) -> Vec<Option<u8>> {
        let Some(past) = self.past.get(key) else { return Vec::new() };
        let skipped = (past.cells.len() + 1).saturating_sub(most);
        let percent = |part: f32| (part.clamp(0.0, 1.0) * 100.0).round() as u8;
        past.cells(trace).skip(skipped).map(|part| part.map(percent)).collect()
    }
}

impl Past {
    fn cells(&self, trace: Trace) -> impl Iterator<Item = Option<f32>> {
        self.cells.iter().map(move |cell| cell[trace as usize]).chain([self.now(trace)])
    }

    fn add(&mut self, values: [Option<f64>; 2]) {
        for (sum, value) in self.sums.iter_mut().zip(values) {
            if let Some(value) = value.filter(|value| value.is_finite()) {
                #[expect(clippy::cast_possible_truncation, reason = "for a mark out of eight")]
                let value = value.clamp(0.0, 1.0) as f32;
                *sum = (sum.0 + value, sum.1.saturating_add(1));
            }
        }
    }

    fn now(&self, trace: Trace) -> Option<f32> {
        let (sum, count) = self.sums[trace as usize];
        (count > 0).then(|| sum / f32::from(count))
    }

    /// A cell is over.
    fn turn(&mut self) {
        self.cells.push_back([self.now(Trace::Load), self.now(Trace::Memory)]);
        if self.cells.len() >= KEPT {
            self.cells.pop_front();
        }
        self.sums = Default::default();
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 7")]
fn level(part: f32) -> usize {
    ((part.clamp(0.0, 1.0) * 8.0) as usize).min(7)
}
