//! Finds the fewest steps from a GPU's instances to its target, around instances in use. No I/O.

use std::fmt;

use anyhow::{anyhow, bail};

use super::{Compute, Gpu, Instance, Profile, Span, Target, Want, device_name};
use sublet_core::text::safe;

/// The steps for one GPU, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// `GPU-…`.
    pub gpu: String,
    /// NVML's index.
    pub index: u32,
    /// Whether the steps need a reset of the GPU.
    pub reset: bool,
    /// Empty if the GPU already matches.
    pub steps: Vec<Step>,
}

/// One call to the driver. GPU instances are named by place, because a recreated instance gets another id.
#[allow(missing_docs, reason = "the message says what the fields are")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Switches MIG mode.
    Mode(bool),
    /// Destroys a compute instance.
    DestroyCompute { instance: Instance, compute: Compute, name: String },
    /// Destroys a GPU instance, which is empty by then.
    DestroyInstance { instance: Instance, name: String },
    /// Creates a GPU instance.
    CreateInstance { profile: u32, span: Span, name: String },
    /// Creates a compute instance.
    CreateCompute { at: Span, slices: u32, span: Option<Span>, name: String },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mode(true) => write!(f, "switch MIG mode on"),
            Self::Mode(false) => write!(f, "switch MIG mode off"),
            Self::DestroyCompute { instance, compute, name } => {
                let (uuid, at) = (&compute.uuid, instance.span);
                write!(f, "destroy compute instance {name} ({uuid}) in the GPU instance at {at}")
            }
            Self::DestroyInstance { instance, name } => {
                write!(f, "destroy GPU instance {name} at {}", instance.span)
            }
            Self::CreateInstance { span, name, .. } => write!(f, "create GPU instance {name} at {span}"),
            Self::CreateCompute { at, name, .. } => {
                write!(f, "create compute instance {name} in the GPU instance at {at}")
            }
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.start, self.size)
    }
}

fn obstacle(gpu: &Gpu, why: &str) -> anyhow::Error {
    anyhow!("{}: {why}", gpu.label())
}

/// The steps from the current state of `gpu` to `target`.
///
/// # Errors
/// It cannot get its target; the text begins with the GPU.
pub fn plan(gpu: &Gpu, target: &Target) -> anyhow::Result<Plan> {
    let done = |reset, steps| Plan { gpu: gpu.uuid.clone(), index: gpu.index, reset, steps };
    let Some(mode) = gpu.mode else {
        if !target.on {
            return Ok(done(false, Vec::new()));
        }
        let (label, name) = (gpu.label(), safe(&gpu.name));
        bail!("{label} ({name}) does not support MIG: leave it out of the layout, or set mig = false");
    };
    let switch = mode.current != target.on;
    let user = gpu.held.first().map(String::as_str);
    if let Some(who) = user.or_else(|| gpu.instances.iter().find_map(Instance::holder)).filter(|_| switch) {
        let (to, who) = (if target.on { "on" } else { "off" }, safe(&format!("{who} holds")));
        let why = format!("MIG mode cannot be switched {to} while {who} the GPU: end it first");
        return Err(obstacle(gpu, &why));
    }
    // A pending mode that is not wanted any more is taken back, which needs no reset.
    let asks = switch || mode.pending != target.on;
    let mode = asks.then_some(Step::Mode(target.on));
    let steps = if target.on {
        mode.into_iter().chain(cut(gpu, &target.want)?).collect()
    } else {
        gpu.instances.iter().flat_map(|instance| destroy(gpu, instance)).chain(mode).collect()
    };
    Ok(done(switch && gpu.resets, steps))
}

fn cut(gpu: &Gpu, want: &[Want]) -> anyhow::Result<Vec<Step>> {
    sensible(gpu, want)?;
    // Sorted, so that equal ones are adjacent.
    let mut kinds: Vec<&Want> = want.iter().collect();
    kinds.sort_by(|a, b| (a.profile, a.start, &a.compute).cmp(&(b.profile, b.start, &b.compute)));
    let Some(placed) = placed(gpu, &kinds, &|instance| instance.holder().is_some()) else {
        return Err(why_not(gpu, &kinds, want));
    };
    let kept = |instance: &Instance| {
        placed.iter().find(|(want, span)| *span == instance.span && want.profile == instance.profile)
    };
    let (mut destroyed, mut created) = (Vec::new(), Vec::new());
    for instance in &gpu.instances {
        match kept(instance).and_then(|(want, _)| recut(gpu, instance, &want.compute)) {
            Some((gone, new)) => {
                destroyed.extend(gone);
                created.extend(new);
            }
            None => destroyed.extend(destroy(gpu, instance)),
        }
    }
    let new = placed.iter().filter(|(want, span)| {
        !gpu.instances.iter().any(|old| old.span == *span && old.profile == want.profile)
    });
    created.extend(new.flat_map(|&(want, span)| create(gpu, want, span)));
    Ok(destroyed.into_iter().chain(created).collect())
}

/// Refuses a layout that no arrangement can satisfy.
fn sensible(gpu: &Gpu, want: &[Want]) -> anyhow::Result<()> {
    let refuse = |why: String| Err(obstacle(gpu, &why));
    for one in want {
        let Some(profile) = gpu.profile(one.profile) else { continue };
        let (name, most, slices) = (&profile.name, profile.instances, profile.slices);
        let asked = want.iter().filter(|other| other.profile == one.profile).count();
        if asked > most as usize {
            return refuse(format!("the layout has {asked} {name}, and this GPU can have at most {most}"));
        }
        if let Some(start) = one.start.filter(|start| !profile.placements.iter().any(|at| at.start == *start))
        {
            let allowed: Vec<_> = profile.placements.iter().map(|at| at.start.to_string()).collect();
            return refuse(format!("a {name} cannot start at {start}, only at {}", allowed.join(", ")));
        }
        if one.compute.iter().sum::<u32>() > slices {
            let cut: Vec<_> = one.compute.iter().map(|&slices| device_name(profile, slices)).collect();
            let cut = cut.join(" and ");
            return refuse(format!("{cut} together do not fit a {name}, which has {slices} compute slices"));
        }
    }
    for (at, engines) in ["JPEG engines", "optical flow accelerators"].into_iter().enumerate() {
        let all = gpu.profiles.iter().map(|profile| profile.media[at]).max().unwrap_or(0);
        let asked = want.iter().filter_map(|one| gpu.profile(one.profile)).map(|profile| profile.media[at]);
        if asked.sum::<u32>() > all {
            return refuse(format!("{} need more {engines} than this GPU has", listed(gpu, want)));
        }
    }
    Ok(())
}

/// The places of `kinds`, of which equal ones are adjacent; `stays` says which instances must stay.
fn placed<'a>(
    gpu: &Gpu,
    kinds: &[&'a Want],
    stays: &dyn Fn(&Instance) -> bool,
) -> Option<Vec<(&'a Want, Span)>> {
    let runs: Vec<&[&Want]> = kinds.chunk_by(|one, next| one == next).collect();
    let group = |run: &&[&Want]| {
        let all = gpu.profile(run[0].profile).map(|profile| profile.placements.clone()).unwrap_or_default();
        let fits = |span: &Span| run[0].start.is_none_or(|start| span.start == start);
        Group { places: all.into_iter().filter(fits).collect(), count: run.len() }
    };
    let groups: Vec<Group> = runs.iter().map(group).collect();
    let fixed: Vec<Span> = gpu.instances.iter().filter(|one| stays(one)).map(|one| one.span).collect();
    let price = |group: usize, span: Span| price(gpu, runs[group][0], span, stays);
    let (_, placed) = arrange(&groups, &fixed, &price, &|placed| room_left(gpu, placed))?;
    Some(placed.into_iter().map(|(group, span)| (runs[group][0], span)).collect())
}

/// More than an instance and all its compute instances can cost, so that no price is negative.
const BASE: u32 = 100;

/// The number of steps that `want` costs at `span`, less the steps that it saves.
fn price(gpu: &Gpu, want: &Want, span: Span, stays: &dyn Fn(&Instance) -> bool) -> Option<u32> {
    let new = BASE + 1 + u32::try_from(want.compute.len()).ok()?;
    let Some(instance) = gpu.instances.iter().find(|one| one.span == span && one.profile == want.profile)
    else {
        let other = gpu.instances.iter().any(|one| stays(one) && one.span == span);
        return (!other).then_some(new);
    };
    match recut(gpu, instance, &want.compute) {
        Some((gone, new)) => {
            let steps = u32::try_from(gone.len() + new.len()).ok()?;
            let saved = 1 + u32::try_from(instance.compute.len()).ok()?;
            Some((BASE + steps).saturating_sub(saved))
        }
        None => (!stays(instance)).then_some(new),
    }
}

/// The room that an arrangement leaves: for each profile, largest first, the number of free places.
pub(super) fn room_left(gpu: &Gpu, placed: &[Placed]) -> Vec<u32> {
    let free = |span: &&Span| !placed.iter().any(|(_, taken)| taken.overlaps(**span));
    let count = |profile: &Profile| profile.placements.iter().filter(free).count();
    gpu.profiles.iter().map(|profile| u32::try_from(count(profile)).unwrap_or(u32::MAX)).collect()
}

/// The steps that give `instance` these compute instances: those that destroy, and those that create.
fn recut(gpu: &Gpu, instance: &Instance, compute: &[u32]) -> Option<(Vec<Step>, Vec<Step>)> {
    let mut sizes = compute.to_vec();
    sizes.sort_unstable();
    let runs: Vec<&[u32]> = sizes.chunk_by(|one, next| one == next).collect();
    let group = |run: &&[u32]| Group { places: places(instance, run[0]), count: run.len() };
    let groups: Vec<Group> = runs.iter().map(group).collect();
    let there = |group: usize, span: Span| {
        instance.compute.iter().find(|one| one.span == span && one.slices == runs[group][0])
    };
    let price = |group: usize, span: Span| {
        let other = |one: &Compute| one.held.is_some() && one.span == span;
        match there(group, span) {
            Some(_) => Some(0),
            None => (!instance.compute.iter().any(other)).then_some(1),
        }
    };
    // It is not known which of them a process uses, so all stay.
    let stays = |one: &&Compute| instance.held.is_some() || one.held.is_some();
    let fixed: Vec<Span> = instance.compute.iter().filter(stays).map(|one| one.span).collect();
    let (_, placed) = arrange(&groups, &fixed, &price, &|_| Vec::new())?;
    let stays_in = |one: &Compute, (group, span): Placed| span == one.span && runs[group][0] == one.slices;
    let gone = instance.compute.iter().filter(|one| !placed.iter().any(|&place| stays_in(one, place)));
    let gone: Vec<Step> = gone.map(|one| destroy_compute(gpu, instance, one)).collect();
    let new = placed.iter().filter(|&&(group, span)| there(group, span).is_none());
    let create = |&(group, span): &Placed| {
        create_compute(gpu, instance.profile, instance.span, runs[group][0], Some(span))
    };
    let new: Vec<Step> = new.map(create).collect();
    Some((gone, new))
}

/// Where a compute instance of that size may lie: the driver's placements, and the places of existing ones.
fn places(instance: &Instance, slices: u32) -> Vec<Span> {
    let kinds = instance.kinds.iter().filter(|kind| kind.slices == slices);
    let there = instance.compute.iter().filter(|one| one.slices == slices).map(|one| one.span);
    let mut places: Vec<Span> = kinds.flat_map(|kind| kind.placements.clone()).chain(there).collect();
    places.sort_unstable();
    places.dedup();
    places
}

fn destroy_compute(gpu: &Gpu, instance: &Instance, compute: &Compute) -> Step {
    let name = gpu.device_name(instance.profile, compute.slices);
    Step::DestroyCompute { instance: instance.clone(), compute: compute.clone(), name }
}

fn create_compute(gpu: &Gpu, profile: u32, at: Span, slices: u32, span: Option<Span>) -> Step {
    Step::CreateCompute { at, slices, span, name: gpu.device_name(profile, slices) }
}

fn destroy(gpu: &Gpu, instance: &Instance) -> Vec<Step> {
    let compute = instance.compute.iter().map(|one| destroy_compute(gpu, instance, one));
    let whole =
        Step::DestroyInstance { instance: instance.clone(), name: gpu.profile_name(instance.profile) };
    compute.chain([whole]).collect()
}

/// The largest compute instance is created first, because the driver places them one after the other.
fn create(gpu: &Gpu, want: &Want, span: Span) -> Vec<Step> {
    let name = gpu.profile_name(want.profile);
    let mut sizes = want.compute.clone();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let compute = sizes.into_iter().map(|slices| create_compute(gpu, want.profile, span, slices, None));
    [Step::CreateInstance { profile: want.profile, span, name }].into_iter().chain(compute).collect()
}

/// The obstacles to the layout: the instances whose removal alone would make it possible, or else all that stay.
fn why_not(gpu: &Gpu, kinds: &[&Want], want: &[Want]) -> anyhow::Error {
    let wanted = listed(gpu, want);
    let held: Vec<&Instance> = gpu.instances.iter().filter(|one| one.holder().is_some()).collect();
    if placed(gpu, kinds, &|_| false).is_none() {
        return obstacle(gpu, &format!("{wanted} together do not fit this GPU, in any arrangement"));
    }
    let alone = |one: &&&Instance| {
        placed(gpu, kinds, &|other| other.holder().is_some() && other.span != one.span).is_some()
    };
    let culprits: Vec<&Instance> = held.iter().filter(alone).copied().collect();
    let named: Vec<String> = if culprits.is_empty() { held } else { culprits }
        .iter()
        .map(|one| {
            let name = gpu.profile_name(one.profile);
            format!("{name} at {} ({})", one.span.start, safe(one.holder().unwrap_or_default()))
        })
        .collect();
    let wanted = if want.is_empty() { "have no instance".to_owned() } else { format!("place {wanted}") };
    let why = format!(
        "it is not possible to {wanted} around {}: end its use first, or give it a place in the layout",
        named.join(", ")
    );
    obstacle(gpu, &why)
}

/// As `2 × 1g.18gb, 3g.71gb at 4`.
fn listed(gpu: &Gpu, want: &[Want]) -> String {
    let mut names: Vec<(String, usize)> = Vec::new();
    for one in want {
        let place = one.start.map(|start| format!(" at {start}")).unwrap_or_default();
        let name = format!("{}{place}", gpu.profile_name(one.profile));
        match names.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => names.push((name, 1)),
        }
    }
    let counted =
        |(name, count): (String, usize)| if count == 1 { name } else { format!("{count} × {name}") };
    names.into_iter().map(counted).collect::<Vec<_>>().join(", ")
}

// Places for pieces that overlap neither each other nor pieces that stay.

/// Equal pieces.
struct Group {
    /// Where one may lie.
    places: Vec<Span>,
    /// How many there are.
    count: usize,
}

/// A placed piece: the index of its group, and its place.
type Placed = (usize, Span);

/// The cheapest arrangement of all pieces that uses each place of `fixed`, with its cost. `price`: the cost of a piece of
/// that group in that place; `None` if it must not lie there. Of two arrangements with the same cost, the one with the
/// greater `worth` wins.
fn arrange(
    groups: &[Group],
    fixed: &[Span],
    price: &dyn Fn(usize, Span) -> Option<u32>,
    worth: &dyn Fn(&[Placed]) -> Vec<u32>,
) -> Option<(u32, Vec<Placed>)> {
    let mut left: Vec<usize> = groups.iter().map(|group| group.count).collect();
    let mut search = Search { groups, fixed, price, worth, best: None };
    search.from(0, &mut left, &mut Vec::new(), 0);
    search.best.map(|(cost, _, placed)| (cost, placed))
}

struct Search<'a> {
    groups: &'a [Group],
    fixed: &'a [Span],
    price: &'a dyn Fn(usize, Span) -> Option<u32>,
    worth: &'a dyn Fn(&[Placed]) -> Vec<u32>,
    /// Its cost and worth.
    best: Option<(u32, Vec<u32>, Vec<Placed>)>,
}

impl Search<'_> {
    /// Places the pieces that are `left` at `start` or after, from left to right, so that each arrangement occurs
    /// once.
    fn from(&mut self, start: u32, left: &mut [usize], placed: &mut Vec<Placed>, cost: u32) {
        if self.best.as_ref().is_some_and(|(best, ..)| cost > *best) {
            return;
        }
        if left.iter().all(|&count| count == 0) {
            if !self.skips(start, u32::MAX) {
                self.keep(cost, placed);
            }
            return;
        }
        for (group, its) in self.groups.iter().enumerate() {
            if left[group] == 0 {
                continue;
            }
            for &span in &its.places {
                let collides = self.fixed.iter().any(|&fixed| fixed != span && fixed.overlaps(span));
                if span.start < start || self.skips(start, span.start) || collides {
                    continue;
                }
                let Some(price) = (self.price)(group, span) else { continue };
                left[group] -= 1;
                placed.push((group, span));
                self.from(span.end(), left, placed, cost + price);
                placed.pop();
                left[group] += 1;
            }
        }
    }

    /// Whether a fixed place between `from` and `to` would stay empty.
    fn skips(&self, from: u32, to: u32) -> bool {
        self.fixed.iter().any(|fixed| (from..to).contains(&fixed.start))
    }

    fn keep(&mut self, cost: u32, placed: &[Placed]) {
        let worth = (self.worth)(placed);
        let is_better = |(best, its, _): &(u32, Vec<u32>, _)| cost < *best || cost == *best && worth > *its;
        if self.best.as_ref().is_none_or(is_better) {
            self.best = Some((cost, worth, placed.to_vec()));
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
