//! Goes through the grid, cell by cell, and keeps the result on disk after each. The file is looked at before anything
//! starts, and gone on with.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::fs::{Access, access};

use super::containers::{ByHand, Workload};
use super::measure::{Interrupted, Meter, Times, measure};
use super::plan::{self, Gpu};
use super::result::{BenchResult, Cell, Measured, Settings};
use super::samples::Source;
use sublet_core::config::Config;
use sublet_core::inventory::Inventory;
use sublet_core::text::safe_path;

/// Everything that stays the same from cell to cell.
pub struct Runner<'a> {
    pub workload: Workload,
    pub source: Source,
    pub times: Times,
    pub repeat: u32,
    pub uuid: String,
    pub gpu: Gpu,
    /// Why a cell cannot be measured, where that depends on the driver and the accounts as they are now.
    pub lacking: &'a dyn Fn(&Cell) -> Option<String>,
    pub meter: Meter,
    pub inventory: &'a Inventory,
    pub config: &'a Config,
    pub stop: &'a dyn Fn() -> bool,
    pub tell: &'a dyn Fn(&str),
}

impl Runner<'_> {
    /// Measures every cell of `grid` that `result` has not got, and writes `result` to `output` after each. Containers and
    /// the same processes by hand are measured in turns, so that a GPU that gets warmer does so for both.
    ///
    /// # Errors
    /// A signal, or the file cannot be written. Earlier measurements are in the file.
    pub fn run(&self, grid: &[Cell], result: &mut BenchResult, output: &Path) -> anyhow::Result<()> {
        // One that failed is tried again.
        let has = |cell: &Cell| {
            let known = result.cell(&cell.load, &cell.mode, cell.n, cell.by_hand);
            known.is_some_and(|known| known.measured.is_some())
        };
        let missing: Vec<&Cell> = grid.iter().filter(|planned| !has(planned)).collect();
        let possible = missing.iter().filter(|planned| self.obstacle(planned).is_none()).count();
        let mut progress = Progress::new([missing.len(), possible], self.repeat, self.tell);
        for turns in missing.chunk_by(|one, other| other.by_hand && one.is_like(other)) {
            for (planned, found) in turns.iter().zip(self.in_turns(turns, &mut progress)?) {
                let cell = cell_of(planned, found);
                (self.tell)(&format!("    {}", outcome(&cell)));
                result.cells.retain(|old| !old.is_like(planned) || old.by_hand != planned.by_hand);
                result.cells.push(cell);
                write(result, output)?;
            }
        }
        Ok(())
    }

    /// Why the configuration or the GPU does not let a cell be measured.
    fn obstacle(&self, planned: &Cell) -> Option<String> {
        plan::obstacle(planned, &self.gpu, &self.config.limits)
    }

    /// Measures each of these cells as often as it was asked for, in turns. One that fails is not tried again.
    fn in_turns(&self, cells: &[&Cell], progress: &mut Progress<'_>) -> anyhow::Result<Vec<Found>> {
        let refusal = |cell: &&Cell| self.obstacle(cell).or_else(|| (self.lacking)(cell)).map_or(Ok(()), Err);
        let mut all: Vec<Result<Vec<Measured>, String>> =
            cells.iter().map(|cell| refusal(cell).map(|()| Vec::new())).collect();
        for _ in 0..self.repeat {
            for (cell, found) in cells.iter().zip(&mut all) {
                progress.tell(cell, found.is_ok());
                let Ok(measured) = found else { continue };
                match self.once(cell) {
                    Ok(one) => measured.push(one),
                    Err(error) if error.is::<Interrupted>() => return Err(error),
                    Err(error) => *found = Err(format!("{error:#}")),
                }
            }
        }
        Ok(all.into_iter().map(|found| found.map(middle)).collect())
    }

    fn once(&self, planned: &Cell) -> anyhow::Result<Measured> {
        let mut workload = self.workload.clone();
        if let Source::BuiltIn = self.source {
            workload.command = [crate::own_root::PROGRAM, "load", &planned.load].map(str::to_owned).to_vec();
        }
        let by_hand = || ByHand::new(planned, &self.uuid, &workload.dir, self.inventory, self.config);
        let by_hand = planned.by_hand.then(by_hand).transpose()?;
        let annotations = planned.annotations(&self.uuid);
        let start = |number: u32| match &by_hand {
            Some(by_hand) => workload.by_hand(number, &by_hand.environment(number)),
            None => workload.start(number, &annotations),
        };
        measure(planned.n, &start, &self.source, self.times, &self.meter, self.stop)
    }
}

/// The figures of a cell, or why there are none.
type Found = Result<Measured, String>;

/// The measurement with the middle mean, or no figures if there is none.
fn middle(mut all: Vec<Measured>) -> Measured {
    let repeats_ms: Vec<f64> = all.iter().map(|one| one.mean_ms).collect();
    all.sort_by(|one, other| one.mean_ms.total_cmp(&other.mean_ms));
    let middle = all.into_iter().nth(repeats_ms.len().saturating_sub(1) / 2).unwrap_or_default();
    let repeats_ms = if repeats_ms.len() > 1 { repeats_ms } else { Vec::new() };
    Measured { repeats_ms, ..middle }
}

/// Tells which measurement of how many is next, and about how long the rest takes.
struct Progress<'a> {
    tell: &'a dyn Fn(&str),
    begun: Instant,
    total: usize,
    done: usize,
    /// Those that take time, of `total` and of `done`.
    possible: usize,
    timed: u32,
}

impl<'a> Progress<'a> {
    /// For so many cells, of which so many can be measured.
    fn new(cells: [usize; 2], repeat: u32, tell: &'a dyn Fn(&str)) -> Self {
        let [total, possible] = cells.map(|cells| cells * repeat as usize);
        Self { tell, begun: Instant::now(), total, done: 0, possible, timed: 0 }
    }

    fn tell(&mut self, planned: &Cell, takes_time: bool) {
        self.done += 1;
        let rest = self.possible.saturating_sub(self.timed as usize);
        let left = if takes_time { remaining(self.begun.elapsed(), self.timed, rest) } else { String::new() };
        self.timed += u32::from(takes_time);
        (self.tell)(&format!("[{}/{}{left}] {}", self.done, self.total, title(planned)));
    }
}

fn cell_of(planned: &Cell, found: Found) -> Cell {
    let lost = |measured: &Measured| {
        let errors: Vec<&str> = measured.containers.iter().filter_map(|one| one.error.as_deref()).collect();
        let (first, lost) = (errors.first()?, errors.len());
        Some(format!("{lost} of {} containers did not work all the time; the first: {first}", planned.n))
    };
    let (error, measured) = match found {
        Ok(measured) => (lost(&measured), Some(measured)),
        Err(why) => (Some(why), None),
    };
    Cell { error, measured, ..planned.clone() }
}

fn title(planned: &Cell) -> String {
    format!("{}, {}, {} at once", planned.load, planned.mode.titled(planned.by_hand), planned.n)
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
    let seconds = (took / timed).saturating_mul(u32::try_from(left).unwrap_or(u32::MAX)).as_secs();
    let (number, unit) = if seconds >= 90 { (seconds.div_ceil(60), "min") } else { (seconds, "s") };
    format!(", about {number} {unit} left")
}

fn write(result: &BenchResult, output: &Path) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(result)? + "\n";
    sublet_core::fs::replace(output, text.as_bytes(), 0o644)
        .with_context(|| format!("cannot write {}; what it had before is still there", output.display()))
}

/// The result that the file has already, to be continued; `None`: there is no such file.
///
/// # Errors
/// It cannot be written, is no result, or is there although nobody said `resume`.
pub fn before(file: &Path, resume: bool) -> anyhow::Result<Option<BenchResult>> {
    let name = safe_path(file);
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(!file.is_dir(), "--output {name}: it is a directory: name a file in it");
    let shown = safe_path(dir);
    ensure!(dir.is_dir(), "--output {name}: {shown} is no directory: create it, or name another one");
    if let Err(error) = access(dir, Access::WRITE_OK | Access::EXEC_OK) {
        bail!("--output {name}: nothing can be written into {shown}: {error}; name another directory");
    }
    if !file.exists() {
        return Ok(None);
    }
    ensure!(resume, "{name} exists: --resume goes on with it, --output names another file");
    Ok(Some(BenchResult::read(file)?))
}

/// `new`, with the measurements from `before`.
///
/// # Errors
/// That was measured on another GPU, by another driver or engine, or in another way.
pub fn go_on(before: BenchResult, new: BenchResult, file: &Path) -> anyhow::Result<BenchResult> {
    let bare = |settings: &Settings| Settings { sm_overcommit: 1.0, time_slice_max: 0, ..settings.clone() };
    let same = [
        ("GPU", before.machine.uuid == new.machine.uuid),
        ("driver", before.machine.driver == new.machine.driver),
        ("engine", before.machine.engine == new.machine.engine),
        ("command or time", bare(&before.settings) == bare(&new.settings)),
    ];
    if let Some((difference, _)) = same.iter().find(|(_, same)| !same) {
        let name = safe_path(file);
        bail!("{name} was measured with another {difference}: it cannot be gone on with");
    }
    let in_use_by_others = before.in_use_by_others || new.in_use_by_others;
    Ok(BenchResult { in_use_by_others, settings: new.settings, ..before })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::result::Tenant;

    fn planned() -> Cell {
        Cell::planned("small", plan::mode("mps:20").unwrap(), 7)
    }

    #[test]
    fn a_cell_has_a_title_and_an_outcome() {
        assert_eq!(title(&planned()), "small, MPS, 20 % each, 7 at once");
        let measured = Measured { mean_ms: 32.123, ..Measured::default() };
        assert_eq!(outcome(&cell_of(&planned(), Ok(measured.clone()))), "mean 32.12 ms (overcommitted)");
        let lost = Tenant { error: Some("it ended".to_owned()), ..Tenant::default() };
        let one_lost = Measured { containers: vec![Tenant::default(), lost], ..measured };
        let cell = cell_of(&planned(), Ok(one_lost));
        assert_eq!(
            cell.error.as_deref(),
            Some("1 of 7 containers did not work all the time; the first: it ended")
        );
        assert_eq!(outcome(&cell_of(&planned(), Err("why".to_owned()))), "not measured: why");
    }

    #[test]
    fn the_measurement_in_the_middle() {
        let measured = |mean_ms| Measured { mean_ms, ..Measured::default() };
        let found = middle([3.0, 1.0, 2.0].map(measured).to_vec());
        assert_eq!((found.mean_ms, found.repeats_ms), (2.0, vec![3.0, 1.0, 2.0]));
        assert_eq!(middle(vec![measured(7.0)]), measured(7.0));
    }

    #[test]
    fn progress_counts_measurements() {
        let lines = std::cell::RefCell::new(Vec::new());
        let tell = |line: &str| lines.borrow_mut().push(line.to_owned());
        let mut progress = Progress::new([1, 1], 2, &tell);
        progress.tell(&planned(), false);
        progress.tell(&planned(), true);
        assert_eq!(
            lines.take(),
            ["[1/2] small, MPS, 20 % each, 7 at once", "[2/2] small, MPS, 20 % each, 7 at once"]
        );
    }

    #[test]
    fn the_time_left() {
        assert_eq!(remaining(Duration::from_secs(10), 0, 40), "");
        assert_eq!(remaining(Duration::from_secs(20), 2, 3), ", about 30 s left");
        assert_eq!(remaining(Duration::from_secs(20), 2, 40), ", about 7 min left");
    }
}
