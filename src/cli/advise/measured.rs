//! What a result of `sublet bench` says about a question.

use super::{AdviseError, Question, Trust};
use crate::bench::{BenchResult, Cell, Measured, Mode, Sharing};
use sublet_core::inventory::Device;
use sublet_core::text::safe;

/// Throughputs this close are the same.
const TIE: f64 = 0.95;

/// Below this fairness one container starves beside the others.
const FAIR: f64 = 0.8;

/// What of a result can be used for one GPU.
#[derive(Debug)]
pub struct Measurements<'a> {
    cells: Vec<(&'a Cell, &'a Measured)>,
    /// Whether it was measured on a GPU of this model. Otherwise only ratios are used.
    same_gpu: bool,
    /// The GPU that was measured.
    gpu: &'a str,
}

/// The figures of one mode. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The load that was measured.
    pub load: String,
    /// The GPU that was measured.
    pub gpu: String,
    /// Whether it is of the model at hand. Otherwise only ratios are used.
    pub same_gpu: bool,
    /// How many ran at once.
    pub n: u32,
    pub mean_ms: f64,
    pub p99_ms: Option<f64>,
    /// Iterations a second, all together.
    pub per_second: f64,
    pub fairness: Option<f64>,
    /// Mean and p99 of one container alone.
    pub alone: Option<(f64, Option<f64>)>,
}

/// What the measurements come to.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    /// Neither this number of tenants nor a larger one.
    NotMeasured,
    /// No mode keeps the target; how near they come, in a sentence.
    NotKept(String),
    /// Those that will do, best first.
    Modes(Vec<(Mode, Found)>),
}

impl<'a> Measurements<'a> {
    /// What of `result` can be used for `gpu`; `None`: nothing. Remarks say what was left out, and why.
    ///
    /// # Errors
    /// It has several loads and none is chosen, or not the one that is.
    pub fn of(
        result: &'a BenchResult,
        load: Option<&str>,
        gpu: &Device,
    ) -> Result<(Option<Self>, Vec<String>), AdviseError> {
        let load = chosen(result, load)?;
        if result.simulated {
            let why = "the result is of a simulated driver: its times are not used";
            return Ok((None, vec![why.to_owned()]));
        }
        let of_load = result.cells.iter().filter(|cell| cell.load == load);
        let cells: Vec<_> = of_load.clone().filter_map(usable).collect();
        let same_gpu = result.machine.gpu == gpu.name;
        let mut remarks = Vec::new();
        let left_out = of_load.count() - cells.len();
        if left_out > 0 {
            remarks.push(format!(
                "{left_out} cells of the result are not used: failed, overcommitted or by hand"
            ));
        }
        if result.in_use_by_others {
            remarks.push("other programs used the GPU while it was measured".to_owned());
        }
        if !same_gpu {
            remarks.push(format!(
                "measured on {}, not on {}: only ratios are used",
                safe(&result.machine.gpu),
                safe(&gpu.name)
            ));
        }
        let found = Self { cells, same_gpu, gpu: &result.machine.gpu };
        Ok(((!found.cells.is_empty()).then_some(found), remarks))
    }

    /// What they say about `question`.
    pub fn verdict(&self, question: &Question) -> Verdict {
        let allowed: Vec<_> = self.allowed(question.trust).collect();
        let larger = allowed.iter().map(|(cell, _)| cell.n).filter(|n| *n >= question.tenants);
        let Some(n) = larger.min() else { return Verdict::NotMeasured };
        // Times of another GPU say nothing about a target in milliseconds.
        let target = question.p99_ms.filter(|_| self.judge_times());
        let at_n = || allowed.iter().filter(|(cell, _)| cell.n == n);
        let keeps = |measured: &Measured| target.is_none_or(|target| keeps(measured, target));
        let kept: Vec<_> = at_n().filter(|(_, measured)| keeps(measured)).collect();
        match target {
            Some(target) if kept.is_empty() => Verdict::NotKept(not_kept(target, n, &allowed)),
            _ => Verdict::Modes(best_first(kept.into_iter().map(|found| self.found(found)).collect())),
        }
    }

    /// The largest number of tenants that was measured in a way that `trust` allows.
    pub fn largest(&self, trust: Trust) -> Option<u32> {
        self.allowed(trust).map(|(cell, _)| cell.n).max()
    }

    /// Whether its times say something about the GPU at hand.
    pub const fn judge_times(&self) -> bool {
        self.same_gpu
    }

    fn allowed(&self, trust: Trust) -> impl Iterator<Item = (&'a Cell, &'a Measured)> {
        self.cells.iter().copied().filter(move |(cell, _)| trust >= needed(cell.mode.sharing))
    }

    fn found(&self, (cell, measured): &(&Cell, &Measured)) -> (Mode, Found) {
        let found = Found {
            load: cell.load.clone(),
            gpu: self.gpu.to_owned(),
            same_gpu: self.same_gpu,
            n: cell.n,
            mean_ms: measured.mean_ms,
            p99_ms: measured.p99_ms,
            per_second: measured.per_second.unwrap_or(f64::from(cell.n) * 1000.0 / measured.mean_ms),
            fairness: measured.fairness,
            alone: self.alone(&cell.mode),
        };
        (cell.mode.clone(), found)
    }

    /// One container alone: on the whole GPU if that was measured, else in the same mode.
    fn alone(&self, mode: &Mode) -> Option<(f64, Option<f64>)> {
        let with = |wanted: &dyn Fn(&Mode) -> bool| {
            self.cells.iter().find(|(cell, _)| cell.n == 1 && wanted(&cell.mode))
        };
        let whole = |one: &Mode| one.sm.is_none() && one.sharing != Sharing::Mig;
        with(&|one| one.sharing == Sharing::Exclusive)
            .or_else(|| with(&|one| one == mode && whole(one)))
            .or_else(|| with(&whole))
            .map(|(_, measured)| (measured.mean_ms, measured.p99_ms))
    }
}

/// The load that is meant.
fn chosen<'a>(result: &'a BenchResult, load: Option<&str>) -> Result<&'a str, AdviseError> {
    let loads = result.loads();
    let found = match load {
        Some(load) => loads.iter().copied().find(|known| *known == load),
        None if loads.len() == 1 => loads.first().copied(),
        None => None,
    };
    found.ok_or_else(|| AdviseError::Load(loads.into_iter().map(safe).collect()))
}

/// Containers of which something sound was measured.
fn usable(cell: &Cell) -> Option<(&Cell, &Measured)> {
    let sound = !cell.by_hand && !cell.overcommitted && cell.error.is_none() && cell.n > 0;
    let measured = cell.measured.as_ref().filter(|measured| measured.mean_ms > 0.0);
    Some((cell, measured.filter(|_| sound)?))
}

/// The least trust with which a way of sharing will do.
const fn needed(sharing: Sharing) -> Trust {
    match sharing {
        Sharing::Exclusive | Sharing::Mig => Trust::Not,
        Sharing::TimeSlice | Sharing::Dedicated => Trust::Partly,
        Sharing::Mps => Trust::Fully,
    }
}

/// A time that is not known keeps no target.
fn keeps(measured: &Measured, target: f64) -> bool {
    measured.p99_ms.is_some_and(|p99| p99 <= target)
}

/// The most throughput first; of those that have about the same, the best protected and fair.
fn best_first(mut left: Vec<(Mode, Found)>) -> Vec<(Mode, Found)> {
    let mut sorted = Vec::new();
    loop {
        let most = left.iter().map(|(_, found)| found.per_second).fold(0.0, f64::max);
        let tied = left.iter().enumerate().filter(|(_, (_, found))| found.per_second >= most * TIE);
        let rank = |(mode, found): &(Mode, Found)| {
            (needed(mode.sharing), found.fairness.is_some_and(|fairness| fairness < FAIR))
        };
        let better = |(_, a): &(usize, &(Mode, Found)), (_, b): &(usize, &(Mode, Found))| {
            rank(a).cmp(&rank(b)).then(b.1.per_second.total_cmp(&a.1.per_second))
        };
        let Some((index, _)) = tied.min_by(better) else { return sorted };
        sorted.push(left.remove(index));
    }
}

fn not_kept(target: f64, n: u32, allowed: &[(&Cell, &Measured)]) -> String {
    let p99s = allowed.iter().filter(|(cell, _)| cell.n == n);
    let p99s = p99s.filter_map(|(cell, measured)| Some((&cell.mode, measured.p99_ms?)));
    let best = p99s.min_by(|a, b| a.1.total_cmp(&b.1)).map_or_else(
        || format!("no p99 was measured with {n} at once"),
        |(mode, p99)| format!("with {n} at once the best p99 is {p99:.1} ms ({})", mode.title()),
    );
    let kept = allowed.iter().filter(|(cell, measured)| cell.n < n && keeps(measured, target));
    let kept = kept.max_by_key(|(cell, _)| cell.n).map_or_else(
        || "it was kept with no smaller number".to_owned(),
        |(cell, _)| format!("it was kept with {} at once ({})", cell.n, cell.mode.title()),
    );
    format!("no measured way keeps a p99 of {target} ms: {best}; {kept}")
}
