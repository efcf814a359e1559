//! Goes through the grid, cell by cell, and keeps the result on disk after each.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::by_hand::ByHand;
use super::containers::Workload;
use super::measure::{Interrupted, Source, Times, measure};
use super::meter::Meter;
use super::plan::{self, Gpu, Planned};
use super::result::{BenchResult, Cell, Measured};
use sublet_core::config::Config;
use sublet_core::fs::atomic;
use sublet_core::inventory::Inventory;

/// Everything that stays the same from cell to cell.
pub struct Runner<'a> {
    pub workload: &'a dyn Fn(&Planned) -> Workload,
    pub source: &'a dyn Fn(&Planned) -> Source,
    pub times: Times,
    pub repeat: u32,
    pub uuid: String,
    pub gpu: Gpu,
    /// Why a cell cannot be measured, where that depends on the driver and the accounts as they are now.
    pub lacking: &'a dyn Fn(&Planned) -> Option<String>,
    pub meter: Meter,
    /// For bundles and pipes.
    pub dir: PathBuf,
    pub inventory: &'a Inventory,
    pub config: &'a Config,
    pub stop: &'a dyn Fn() -> bool,
}

impl Runner<'_> {
    /// Measures every cell of `grid` that `result` has not got, and writes `result` to `output` after each.
    ///
    /// # Errors
    /// A signal, or the file cannot be written. What was measured before is in the file.
    pub fn run(
        &self,
        grid: &[Planned],
        result: &mut BenchResult,
        output: &Path,
        tell: &dyn Fn(&str),
    ) -> anyhow::Result<()> {
        let wanted: Vec<&Planned> = grid.iter().filter(|planned| !has(result, planned)).collect();
        let obstacle = |planned: &Planned| plan::obstacle(planned, &self.gpu, &self.config.limits);
        let begun = Instant::now();
        let mut timed = 0;
        for (done, planned) in wanted.iter().enumerate() {
            let rest = wanted[done..].iter().filter(|planned| obstacle(planned).is_none());
            let left = remaining(begun.elapsed(), timed, rest.count());
            tell(&format!("[{}/{}{left}] {}", done + 1, wanted.len(), title(planned)));
            let obstacle = obstacle(planned).or_else(|| (self.lacking)(planned));
            timed += u32::from(obstacle.is_none());
            let found =
                match obstacle.map_or_else(|| self.median(planned), |why| Err(anyhow::Error::msg(why))) {
                    Err(error) if error.is::<Interrupted>() => return Err(error),
                    found => found.map_err(|error| format!("{error:#}")),
                };
            let cell = cell_of(planned, found);
            tell(&format!("    {}", outcome(&cell)));
            result.cells.retain(|old| !is_of(old, planned));
            result.cells.push(cell);
            write(result, output)?;
        }
        Ok(())
    }

    /// The measurement with the middle mean of several.
    fn median(&self, planned: &Planned) -> anyhow::Result<Measured> {
        let mut all = Vec::new();
        for _ in 0..self.repeat.max(1) {
            all.push(self.once(planned)?);
        }
        all.sort_by(|one: &Measured, other| one.mean_ms.total_cmp(&other.mean_ms));
        let middle = (all.len() - 1) / 2;
        Ok(all.swap_remove(middle))
    }

    fn once(&self, planned: &Planned) -> anyhow::Result<Measured> {
        let workload = (self.workload)(planned);
        let source = (self.source)(planned);
        let by_hand = planned
            .by_hand
            .then(|| ByHand::new(planned, &self.uuid, &self.dir, self.inventory, self.config))
            .transpose()?;
        let annotations = planned.annotations(&self.uuid);
        let start = |number: u32| match &by_hand {
            Some(by_hand) => workload.by_hand(number, &by_hand.environment(number)),
            None => workload.start(number, &annotations),
        };
        measure(planned.n, &start, &source, self.times, &self.meter, self.stop)
    }
}

fn is_of(cell: &Cell, planned: &Planned) -> bool {
    cell.load == planned.load
        && cell.mode == planned.mode
        && cell.n == planned.n
        && cell.by_hand == planned.by_hand
}

/// Whether the result has a measurement of this cell. One that failed is tried again.
fn has(result: &BenchResult, planned: &Planned) -> bool {
    result.cells.iter().any(|cell| is_of(cell, planned) && cell.measured.is_some())
}

fn cell_of(planned: &Planned, found: Result<Measured, String>) -> Cell {
    let lost = |measured: &Measured| {
        let lost = measured.containers.iter().filter(|one| one.error.is_some()).count();
        let first = measured.containers.iter().find_map(|one| one.error.clone());
        first.map(|first| format!("{lost} of {} containers ended early; the first: {first}", planned.n))
    };
    let (error, measured) = match found {
        Ok(measured) => (lost(&measured), Some(measured)),
        Err(why) => (Some(why), None),
    };
    Cell {
        load: planned.load.clone(),
        mode: planned.mode.clone(),
        n: planned.n,
        by_hand: planned.by_hand,
        overcommitted: planned.is_overcommitted(),
        error,
        measured,
    }
}

fn title(planned: &Planned) -> String {
    let by_hand = if planned.by_hand { ", by hand" } else { "" };
    format!("{}, {}{by_hand}, {} at once", planned.load, planned.mode.title(), planned.n)
}

fn outcome(cell: &Cell) -> String {
    let mark = if cell.overcommitted { " (overcommitted)" } else { "" };
    match (&cell.measured, &cell.error) {
        (Some(measured), None) => format!("mean {:.2} ms{mark}", measured.mean_ms),
        (Some(measured), Some(why)) => format!("mean {:.2} ms{mark}; {why}", measured.mean_ms),
        (None, why) => format!("not measured: {}", why.as_deref().unwrap_or("no reason given")),
    }
}

/// `, 6 min left`, once cells have been timed.
fn remaining(took: Duration, timed: u32, left: usize) -> String {
    if timed == 0 {
        return String::new();
    }
    let each = took / timed;
    let seconds = each.saturating_mul(u32::try_from(left).unwrap_or(u32::MAX)).as_secs();
    if seconds >= 90 {
        format!(", about {} min left", seconds.div_ceil(60))
    } else {
        format!(", about {seconds} s left")
    }
}

fn write(result: &BenchResult, output: &Path) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(result)? + "\n";
    atomic::replace(output, text.as_bytes(), 0o644)
        .with_context(|| format!("cannot write {}; what it had before is still there", output.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::result::Tenant;

    fn planned() -> Planned {
        Planned { load: "small".to_owned(), mode: plan::mode("mps:20").unwrap(), n: 7, by_hand: false }
    }

    #[test]
    fn what_is_told_of_a_cell() {
        assert_eq!(title(&planned()), "small, MPS, 20 % each, 7 at once");
        let measured = Measured { mean_ms: 32.123, ..Measured::default() };
        assert_eq!(outcome(&cell_of(&planned(), Ok(measured.clone()))), "mean 32.12 ms (overcommitted)");
        let lost = Tenant { error: Some("it ended".to_owned()), ..Tenant::default() };
        let one_lost = Measured { containers: vec![Tenant::default(), lost], ..measured };
        let cell = cell_of(&planned(), Ok(one_lost));
        assert_eq!(cell.error.as_deref(), Some("1 of 7 containers ended early; the first: it ended"));
        assert_eq!(outcome(&cell_of(&planned(), Err("why".to_owned()))), "not measured: why");
    }

    #[test]
    fn the_time_left() {
        assert_eq!(remaining(Duration::from_secs(10), 0, 40), "");
        assert_eq!(remaining(Duration::from_secs(20), 2, 3), ", about 30 s left");
        assert_eq!(remaining(Duration::from_secs(20), 2, 40), ", about 7 min left");
    }
}
