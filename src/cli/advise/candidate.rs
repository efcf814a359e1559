//! Ways to share, as annotations of each tenant: as a result of `sublet bench` orders them, and as rules do.

use std::collections::BTreeMap;

use super::{AdviseError, Host, Question, Trust};
use crate::bench::{BenchResult, Cell, Measured, Mode, Sharing, Sm};
use crate::preview::Whose;
use sublet_core::inventory::Device;
use sublet_core::place::{SERVER_BYTES, bookings};
use sublet_core::share::{Isolation, MIB, Percent};
use sublet_core::text::safe;

/// Equal parts of the memory are rounded down to this, in bytes.
const STEP: u64 = 256 * MIB;

/// A way to share.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The mode.
    pub mode: Mode,
    /// The same for each tenant.
    pub annotations: BTreeMap<String, String>,
    /// The memory of each that the annotations limit.
    pub memory_bytes: Option<u64>,
    /// Its figures, if it was measured.
    pub found: Option<Found>,
}

impl Candidate {
    /// `mode` for the tenants of `question` on `gpu`; `None` if the memory that they need is not in it.
    pub fn new(
        mode: &Mode,
        found: Option<Found>,
        question: &Question,
        gpu: &Device,
        host: Host<'_>,
    ) -> Option<Self> {
        if mode.sharing == Sharing::Mig && !mig_suits(mode, question, gpu, host) {
            return None;
        }
        let memory_bytes = memory(mode, question, gpu, host);
        let mut annotations = shape(mode, host);
        if let Some(bytes) = memory_bytes {
            annotations.insert("sublet.memory".to_owned(), amount(bytes));
        }
        if let Some(sm) = mode.sm.filter(|_| matches!(mode.sharing, Sharing::Mps | Sharing::Dedicated)) {
            annotations.insert("sublet.sm".to_owned(), percent(sm.percent(question.tenants)));
        }
        // Whole GPUs for several tenants are several GPUs.
        let any = mode.sharing == Sharing::Exclusive && !question.named;
        if host.inventory.gpus().count() > 1 && !any {
            annotations.insert("sublet.gpu".to_owned(), gpu.number());
        }
        Some(Self { mode: mode.clone(), annotations, memory_bytes, found })
    }
}

/// The annotations of a mode without its amounts.
fn shape(mode: &Mode, host: Host<'_>) -> BTreeMap<String, String> {
    let dedicated_is_default = host.config.defaults.isolation == Isolation::Dedicated;
    let pairs: &[(&str, &str)] = match (mode.sharing, &mode.profile) {
        (Sharing::Exclusive, _) => &[("mode", "exclusive")],
        (Sharing::TimeSlice, _) => &[("mode", "time-slice")],
        (Sharing::Mps, _) if dedicated_is_default => &[("mode", "mps"), ("isolation", "shared")],
        (Sharing::Mps, _) => &[("mode", "mps")],
        (Sharing::Dedicated, _) => &[("mode", "mps"), ("isolation", "dedicated")],
        (Sharing::Mig, Some(profile)) => &[("mig", profile.as_str())],
        (Sharing::Mig, None) => &[("mode", "mig")],
    };
    pairs.iter().map(|(key, value)| (format!("sublet.{key}"), (*value).to_owned())).collect()
}

/// Each tenant's limit, in bytes.
fn memory(mode: &Mode, question: &Question, gpu: &Device, host: Host<'_>) -> Option<u64> {
    let servers = match mode.sharing {
        Sharing::Exclusive => return None,
        // A profile has its own; without one the size chooses an instance.
        Sharing::Mig => return asked(question, gpu).filter(|_| mode.profile.is_none()),
        Sharing::Mps => 1,
        Sharing::TimeSlice | Sharing::Dedicated => u64::from(question.tenants),
    };
    Some(asked(question, gpu).unwrap_or_else(|| {
        // An equal part of the memory that may be booked now. Less is for the placing to refuse.
        let free = bookings(gpu, host.ledger, host.config).memory_free;
        let each = free.saturating_sub(servers * SERVER_BYTES) / u64::from(question.tenants.max(1));
        (each / STEP * STEP).max(STEP)
    }))
}

/// The need of each tenant, in bytes.
pub fn asked(question: &Question, gpu: &Device) -> Option<u64> {
    question.memory.map(|memory| memory.on(gpu.memory_bytes))
}

/// Whether the tenants' memory fits on the GPU one at a time but not at once, and those that are out may be suspended.
pub fn fits_in_turns(question: &Question, gpu: &Device, host: Host<'_>) -> bool {
    let suspends = host.config.suspend.on_demand && host.whose == Whose::Root && !gpu.mig_enabled;
    let free = bookings(gpu, host.ledger, host.config).memory_free;
    let too_many = |each: u64| each <= free && each.saturating_mul(question.tenants.into()) > free;
    suspends && question.trust != Trust::None && asked(question, gpu).is_some_and(too_many)
}

/// Whether MIG devices of this kind have the memory, and share none of it where nobody is trusted.
fn mig_suits(mode: &Mode, question: &Question, gpu: &Device, host: Host<'_>) -> bool {
    let of_kind = |device: &Device| mode.profile.as_deref().is_none_or(|profile| profile == device.kind());
    let devices: Vec<_> =
        host.inventory.mig_devices_of(&gpu.uuid).filter(|(device, _)| of_kind(device)).collect();
    let alone = devices.iter().all(|(_, part)| part.siblings.is_empty());
    let needs = asked(question, gpu).filter(|_| mode.profile.is_some()).unwrap_or_default();
    devices.iter().all(|(device, _)| own_memory(device) >= needs) && (alone || question.trust != Trust::None)
}

/// The memory of a MIG device; of one that shares it with other compute instances, its part.
pub fn own_memory(device: &Device) -> u64 {
    let part = device.mig_device.as_ref().filter(|part| !part.siblings.is_empty());
    part.map_or(device.memory_bytes, |part| {
        let (own, all) = part.slices;
        device.memory_bytes / u64::from(all.max(1)) * u64::from(own)
    })
}

/// As an annotation: `8GiB`, or in MiB, rounded down.
pub fn amount(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    if bytes % GIB == 0 { format!("{}GiB", bytes / GIB) } else { format!("{}MiB", bytes / MIB) }
}

/// As an annotation. Under 1, the sign says that no fraction of the whole is meant.
fn percent(percent: f64) -> String {
    let exact = Percent::nearest(percent);
    let sign = if exact.thousandths() < 1000 { "%" } else { "" };
    format!("{exact}{sign}")
}

// The candidates by the rules of docs/modes.md alone, without a measurement.

/// The candidates, best first.
pub fn candidates(question: &Question, gpu: &Device, host: Host<'_>) -> Vec<Candidate> {
    let mut modes = Vec::new();
    if question.tenants == 1 {
        modes.push(plain(Sharing::Exclusive));
    }
    modes.extend(mig(question, gpu, host));
    match question.trust {
        Trust::None if question.tenants > 1 => modes.push(plain(Sharing::Exclusive)),
        Trust::None => {}
        Trust::Some => modes.extend(in_turns()),
        Trust::All => modes.extend(together(question).into_iter().chain(in_turns())),
    }
    let candidate = |mode: &Mode| Candidate::new(mode, None, question, gpu, host);
    let mut found: Vec<Candidate> = modes.iter().filter_map(candidate).collect();
    // Whether tenants without a limit would all have the memory that they need if they keep to it.
    let free = bookings(gpu, host.ledger, host.config).memory_free;
    let tenants = u64::from(question.tenants);
    let suits = asked(question, gpu).is_none_or(|each| each.saturating_mul(tenants) <= free);
    if question.trust != Trust::None && suits {
        // All that is left without MPS programs: turns without a limit on memory.
        found.extend(candidate(&plain(Sharing::TimeSlice)).map(|mut turns| {
            turns.annotations.remove("sublet.memory");
            Candidate { memory_bytes: None, ..turns }
        }));
    }
    found
}

/// Said where there is no candidate.
pub fn none(question: &Question, gpu: &Device) -> String {
    format!(
        "nothing on {} ({}) separates {} tenants as --trust {} asks",
        gpu.label(),
        safe(&gpu.name),
        question.tenants,
        crate::shown::name_of(&question.trust)
    )
}

const fn plain(sharing: Sharing) -> Mode {
    Mode { sharing, sm: None, profile: None }
}

const fn equal(sharing: Sharing) -> Mode {
    Mode { sharing, sm: Some(Sm::Equal), profile: None }
}

/// A crash of one ends no other. The limit on SMs is for hosts that require one.
fn in_turns() -> [Mode; 2] {
    [plain(Sharing::TimeSlice), equal(Sharing::Dedicated)]
}

/// At the same time. Only a limit keeps one tenant from making the rest late.
fn together(question: &Question) -> [Mode; 2] {
    let mut modes = [plain(Sharing::Mps), equal(Sharing::Mps)];
    if question.p99_ms.is_some() {
        modes.reverse();
    }
    modes
}

/// Profiles of the GPU's MIG devices: the smallest that is large enough, or, where nobody gives a need, the
/// largest first. Then devices of any profile.
fn mig(question: &Question, gpu: &Device, host: Host<'_>) -> Vec<Mode> {
    if !gpu.mig_enabled {
        return Vec::new();
    }
    let mut sizes: Vec<(u64, String)> = Vec::new();
    for (device, part) in host.inventory.mig_devices_of(&gpu.uuid) {
        if !sizes.iter().any(|(_, known)| *known == part.profile) {
            sizes.push((own_memory(device), part.profile.clone()));
        }
    }
    sizes.sort();
    if question.memory.is_none() {
        sizes.reverse();
    }
    let of = |(_, profile): (u64, String)| Mode { profile: Some(profile), ..plain(Sharing::Mig) };
    sizes.into_iter().map(of).chain([plain(Sharing::Mig)]).collect()
}

// The answer of a result of `sublet bench` to a question.

/// Throughputs this close are the same.
const TIE: f64 = 0.95;

/// Below this fairness one container starves beside the rest.
const FAIR: f64 = 0.8;

/// The part of a result that can be used for one GPU.
#[derive(Debug)]
pub struct Measurements<'a> {
    cells: Vec<(&'a Cell, &'a Measured)>,
    /// Whether it was measured on a GPU of this model. Otherwise its times say nothing, and only ratios are used.
    pub same_gpu: bool,
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

/// The conclusion from the measurements.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    /// Neither this number of tenants nor a larger one.
    NotMeasured,
    /// No mode keeps the target; how near they come, in a sentence.
    NotKept(String),
    /// The modes that will do, best first.
    Modes(Vec<(Mode, Found)>),
}

impl<'a> Measurements<'a> {
    /// The part of `result` that can be used for `gpu`; `None`: nothing. Remarks name the rest, and say why.
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
            return Ok((
                None,
                vec!["the result is of a simulated driver: its times are not used".to_owned()],
            ));
        }
        let of_load = result.cells.iter().filter(|cell| cell.load == load);
        let cells: Vec<_> = of_load.clone().filter_map(usable).collect();
        let same_gpu = result.machine.gpu == gpu.name;
        let left_out = of_load.count() - cells.len();
        let (measured, here) = (safe(&result.machine.gpu), safe(&gpu.name));
        let remarks = [
            (
                left_out > 0,
                format!("{left_out} cells of the result are not used: failed, overcommitted or by hand"),
            ),
            (result.in_use_by_others, "other programs used the GPU while it was measured".to_owned()),
            (!same_gpu, format!("measured on {measured}, not on {here}: only ratios are used")),
        ];
        let remarks = remarks.into_iter().filter_map(|(is_so, remark)| is_so.then_some(remark)).collect();
        let found = Self { cells, same_gpu, gpu: &result.machine.gpu };
        Ok(((!found.cells.is_empty()).then_some(found), remarks))
    }

    /// Their answer to `question`.
    pub fn verdict(&self, question: &Question) -> Verdict {
        let allowed: Vec<_> = self.allowed(question.trust).collect();
        let larger = allowed.iter().map(|(cell, _)| cell.n).filter(|n| *n >= question.tenants);
        let Some(n) = larger.min() else { return Verdict::NotMeasured };
        // Times of another GPU say nothing about a target in milliseconds.
        let target = question.p99_ms.filter(|_| self.same_gpu);
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
        Sharing::Exclusive | Sharing::Mig => Trust::None,
        Sharing::TimeSlice | Sharing::Dedicated => Trust::Some,
        Sharing::Mps => Trust::All,
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
