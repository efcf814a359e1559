//! Rows of programs that are timed in turns, and their medians.

use std::time::Duration;

/// Rounds at the beginning that do not count.
pub const WARM_UP: usize = 2;

/// Rows that are compared with the first of them.
pub struct Group {
    pub title: &'static str,
    pub rows: Vec<Row>,
}

/// What was timed.
pub struct Row {
    pub what: String,
    /// What is wanted, beside the group's first row.
    pub goal: &'static str,
    /// Its parts: create, start and delete; otherwise one.
    pub times: Vec<Vec<Duration>>,
}

impl Row {
    pub fn new(what: impl Into<String>, goal: &'static str) -> Self {
        Self { what: what.into(), goal, times: Vec::new() }
    }

    /// Milliseconds of each round that counts.
    pub fn totals(&self) -> Vec<f64> {
        self.times[WARM_UP..].iter().map(|parts| millis(parts.iter().sum())).collect()
    }

    pub fn median(&self) -> f64 {
        median(self.totals())
    }

    /// The median of part `part`, in milliseconds.
    pub fn part(&self, part: usize) -> f64 {
        median(self.times[WARM_UP..].iter().map(|parts| millis(parts[part])).collect())
    }

    /// The median of what it took more than `base` in the same round, in milliseconds.
    pub fn more(&self, base: &Self) -> f64 {
        median(self.totals().iter().zip(base.totals()).map(|(own, base)| own - base).collect())
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}
