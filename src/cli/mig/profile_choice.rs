//! Chooses the instance to create for a container, and its place: existing instances stay, and as many places for large
//! profiles as possible remain. No I/O.

use super::layout_target::unknown;
use super::plan::room_left;
use super::{Answer, Compute, Driver, Gpu, Instance, Profile, Span, Step, Target, Want, device_name, plan};
use sublet_core::config::Policy;
use sublet_core::inventory::Inventory;
use sublet_core::ledger::{DynamicInstance, LeasedMigDevice, Ledger};
use sublet_core::place::{Order, Site, Size};
use sublet_core::share::{MIB, Percent};
use sublet_core::text::safe;

/// How many instances of one GPU a message names.
const NAMED: usize = 4;

/// Why no instance can be, or was, created, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct NotMade {
    /// The reason.
    pub reason: String,
    /// Whether one may be possible once other containers have ended.
    pub temporary: bool,
}

/// The instances that can be created for `order` on `gpus`, best first: the smallest sufficient profile, and of its
/// places the one that leaves the most room for large profiles.
pub(super) fn choices(order: &Order, gpus: &[Gpu], policy: Policy) -> Result<Vec<DynamicInstance>, NotMade> {
    let mut found = Vec::new();
    let (mut missing, mut full, mut capped) = (Vec::new(), Vec::new(), Vec::new());
    for site in &order.sites {
        let is_its = |gpu: &&Gpu| gpu.uuid == site.gpu && gpu.mode.is_some_and(|mode| mode.current);
        let Some(gpu) = gpus.iter().find(is_its) else { continue };
        let suited = suited(order, site, gpu);
        if suited.is_empty() {
            missing.push(never(order, site, gpu));
        }
        for (profile, slices) in suited {
            if let Some(over) = over(site, gpu, profile, slices) {
                capped.push(over);
                continue;
            }
            match place(gpu, profile, slices) {
                Some((span, lost)) => {
                    let spread = if policy == Policy::Spread { gpu.instances.len() } else { 0 };
                    let rank = (size(profile), slices, spread, lost, gpu.index);
                    let (name, placement) = (device_name(profile, slices), (span.start, span.size));
                    let (gpu, profile) = (gpu.uuid.clone(), profile.id);
                    let rest = DynamicInstance::default();
                    found.push((rank, DynamicInstance { gpu, profile, name, placement, slices, ..rest }));
                }
                None => full.push(no_room(gpu, profile, slices)),
            }
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    if found.is_empty() {
        return Err(nothing(&missing, &full, capped));
    }
    Ok(found.into_iter().map(|(_, choice)| choice).collect())
}

/// An instance that would be created.
#[derive(Clone, Debug)]
pub(crate) struct Foreseen {
    choice: DynamicInstance,
    /// How many would be created before it.
    number: u32,
    /// In words: `1g.18gb at 6:1 of GPU 0`.
    pub label: String,
    /// Its compute instance's SMs at least.
    pub sms: u32,
    /// Its compute instance's part of the memory, in bytes.
    pub memory_bytes: u64,
}

/// The best of [`choices`] once the instances `before` it have been created.
///
/// # Errors
/// The driver does not answer; for inner errors see [`choices`].
pub(crate) fn foresee(
    order: &Order,
    driver: &mut dyn Driver,
    ledger: &Ledger,
    policy: Policy,
    before: &[Foreseen],
) -> Answer<Result<Foreseen, NotMade>> {
    let mut gpus = seen(order, driver, ledger)?;
    for gpu in &mut gpus {
        gpu.instances.extend(before.iter().filter(|one| one.choice.gpu == gpu.uuid).map(Foreseen::instance));
        gpu.instances.sort_by_key(|one| one.span);
    }
    let number = u32::try_from(before.len()).unwrap_or(u32::MAX);
    Ok(choices(order, &gpus, policy).and_then(|found| {
        let best = found.into_iter().next().and_then(|choice| Foreseen::new(choice, &gpus, number));
        best.ok_or_else(|| nothing(&[], &[], Vec::new()))
    }))
}

impl Foreseen {
    fn new(choice: DynamicInstance, gpus: &[Gpu], number: u32) -> Option<Self> {
        let gpu = gpus.iter().find(|gpu| gpu.uuid == choice.gpu)?;
        let label = format!("{} of {}", choice.label(), gpu.label());
        let profile = gpu.profile(choice.profile)?;
        let sms = u32::try_from(sms(gpu, profile, choice.slices)).ok()?;
        let slice = profile.memory_mib.saturating_mul(MIB) / u64::from(profile.slices.max(1));
        let memory_bytes = slice.saturating_mul(choice.slices.into());
        Some(Self { choice, number, label, sms, memory_bytes })
    }

    /// As `1g.18gb` or `1c.2g.35gb`.
    pub fn name(&self) -> &str {
        &self.choice.name
    }

    /// The device that its container would hold, under a UUID that no device has.
    pub fn leased(&self, inventory: &Inventory) -> LeasedMigDevice {
        let all = inventory.device(&self.choice.gpu).and_then(|gpu| gpu.sm_count);
        LeasedMigDevice {
            uuid: format!("MIG-foreseen-{}", self.number),
            gpu: self.choice.gpu.clone(),
            gi: self.gi(),
            ci: 0,
            placement: Some(self.choice.placement),
            sm: all.map(|all| Percent::of_all(self.sms, all)),
            memory_bytes: Some(self.memory_bytes),
        }
    }

    /// An id that no instance has: the driver counts from 0.
    fn gi(&self) -> u32 {
        u32::MAX - self.number
    }

    fn instance(&self) -> Instance {
        let DynamicInstance { profile, placement, slices, .. } = self.choice;
        let held = Some("created for a container before it".to_owned());
        let own = Span { start: 0, size: slices };
        let compute = vec![Compute { ci: 0, slices, span: own, uuid: String::new(), held: held.clone() }];
        Instance { gi: self.gi(), profile, span: Span::at(placement), held, kinds: Vec::new(), compute }
    }
}

/// The GPUs on which `order` may have an instance, as far as they are [`super::answering`], with the users of their instances.
pub(super) fn seen(order: &Order, driver: &mut dyn Driver, ledger: &Ledger) -> Answer<Vec<Gpu>> {
    let mut gpus = super::answering(order.sites.iter().map(|site| &*site.gpu), driver)?;
    for gpu in &mut gpus {
        gpu.mark(ledger);
    }
    Ok(gpus)
}

/// The sufficient profiles, each with the compute slices of its compute instance.
fn suited<'g>(order: &Order, site: &Site, gpu: &'g Gpu) -> Vec<(&'g Profile, u32)> {
    let slices = |profile: &Profile| match &order.profile {
        None => Some(profile.slices),
        Some(name) => slices_of(name, profile),
    };
    let large = |profile: &Profile| {
        profile.memory_mib.saturating_mul(MIB) >= site.memory_bytes && u64::from(profile.sms) >= site.sms
    };
    let fits = gpu.profiles.iter().filter(|profile| large(profile));
    let mut suited: Vec<_> = fits.filter_map(|profile| Some((profile, slices(profile)?))).collect();
    suited.sort_by_key(|(profile, _)| size(profile));
    suited
}

/// The slices of the compute instance `name`, if it is one of such a GPU instance.
fn slices_of(name: &str, profile: &Profile) -> Option<u32> {
    (1..=profile.slices).find(|&slices| device_name(profile, slices) == name)
}

/// The sort key of a profile: of two with the same memory and SMs, the one without special engines comes first.
fn size(profile: &Profile) -> (u64, u32, u32, usize) {
    (profile.memory_mib, profile.sms, profile.media.iter().sum(), profile.name.len())
}

/// The best place for one more instance of `profile` beside the existing ones, and how many places each profile loses
/// by it, largest profile first.
fn place(gpu: &Gpu, profile: &Profile, slices: u32) -> Option<(Span, Vec<u32>)> {
    let mut settled = gpu.clone();
    for one in &mut settled.instances {
        one.held = Some(String::new());
    }
    settled.mode = settled.mode.map(|mode| super::Mode { pending: mode.current, ..mode });
    let mut want: Vec<Want> = settled.instances.iter().map(Want::of).collect();
    want.push(Want { profile: profile.id, start: None, compute: vec![slices] });
    let plan = plan(&settled, &Target { gpu: gpu.uuid.clone(), on: true, want }).ok()?;
    let span = plan.steps.iter().find_map(|step| match step {
        Step::CreateInstance { span, .. } => Some(*span),
        _ => None,
    })?;
    let taken: Vec<_> = gpu.instances.iter().map(|one| (0, one.span)).chain([(0, span)]).collect();
    let before = room_left(gpu, &taken[..taken.len() - 1]);
    let lost = before.iter().zip(room_left(gpu, &taken)).map(|(before, after)| before - after).collect();
    Some((span, lost))
}

fn never(order: &Order, site: &Site, gpu: &Gpu) -> String {
    match &order.profile {
        Some(name) if !gpu.profiles.iter().any(|profile| slices_of(name, profile).is_some()) => {
            unknown(name, gpu)
        }
        _ => {
            let (mib, sms, label) = (site.memory_bytes / MIB, site.sms, gpu.label());
            let profile = order.profile.as_deref().map_or_else(|| "profile".to_owned(), safe);
            format!("{label} ({}) has no {profile} with {mib} MiB and {sms} SMs", safe(&gpu.name))
        }
    }
}

fn no_room(gpu: &Gpu, profile: &Profile, slices: u32) -> String {
    let one = |one: &Instance| {
        let holder = one.holder().map(|who| format!(" ({})", safe(who))).unwrap_or_default();
        format!("{} at {}{holder}", safe(&gpu.profile_name(one.profile)), one.span.start)
    };
    let mut there: Vec<String> = gpu.instances.iter().take(NAMED).map(one).collect();
    let more = gpu.instances.len().saturating_sub(NAMED);
    there.extend((more > 0).then(|| format!("{more} more")));
    let beside = if there.is_empty() { String::new() } else { format!(" beside {}", there.join(", ")) };
    format!("{} has no room for a {}{beside}", gpu.label(), safe(&device_name(profile, slices)))
}

/// The refusal if the user's policy limit does not allow this instance.
fn over(site: &Site, gpu: &Gpu, profile: &Profile, slices: u32) -> Option<NotMade> {
    let most = site.most?;
    let (sms, memory) = (sms(gpu, profile, slices), profile.memory_mib.saturating_mul(MIB));
    let within = |size: Size| sms <= size.sms && memory <= size.memory_bytes;
    let (left, has) = if sms > most.now.sms {
        (format!("{} SMs", most.now.sms), format!("{sms}"))
    } else {
        (format!("{} MiB", most.now.memory_bytes / MIB), format!("{}", profile.memory_mib))
    };
    let temporary = within(most.ever);
    let (name, label) = (safe(&device_name(profile, slices)), gpu.label());
    let reason = format!("your policy leaves you {left} of {label}, and a {name} has {has}");
    (!within(most.now)).then_some(NotMade { reason, temporary })
}

/// A lower bound of the compute instance's SMs: the driver reports the number only inside an existing GPU instance.
/// (Of the 60 SMs of an H100's `3g` one slice has 16, as `1g` has.)
fn sms(gpu: &Gpu, profile: &Profile, slices: u32) -> u64 {
    let alike = gpu.profiles.iter().filter(|other| other.slices == slices).map(|other| other.sms);
    let part = profile.sms * slices / profile.slices.max(1);
    let least = if slices == profile.slices { part } else { alike.fold(part, u32::min) };
    u64::from(least)
}

/// The refusal. If several profiles are too large for the policy limit, only the smallest is named.
fn nothing(missing: &[String], full: &[String], capped: Vec<NotMade>) -> NotMade {
    if let Some(least) = capped.into_iter().next().filter(|_| full.is_empty()) {
        return least;
    }
    let mut lines: Vec<String> = Vec::new();
    for line in full.iter().chain(missing) {
        let gpu = line.split_once(" has no ").map(|(gpu, _)| gpu);
        if !lines.iter().any(|known| gpu.is_some_and(|gpu| known.starts_with(&format!("{gpu} has no ")))) {
            lines.push(line.clone());
        }
    }
    if lines.is_empty() {
        lines.push("MIG mode is off on every GPU that the request allows".to_owned());
    }
    NotMade { reason: lines.join("; "), temporary: !full.is_empty() }
}

#[cfg(test)]
#[path = "profile_choice_tests.rs"]
mod tests;
