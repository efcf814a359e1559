//! From selectors to devices: which devices a request may have, and which of those it takes.

use super::World;
use crate::config::{Config, DeviceRule};
use crate::inventory::{Device, Inventory, LeftOut};
use crate::request::Request;
use crate::share::{Devices, Mode, Selector, glob_matches};
use crate::text::safe;

/// The first rule of the configuration that matches `device`.
pub fn rule<'a>(device: &Device, config: &'a Config) -> Option<&'a DeviceRule> {
    config.device.iter().find(|rule| rule_matches(&rule.matches, device))
}

/// `[[device]] match`: a selector as in `sublet.gpu`, or `all`. A match of a GPU does not match its MIG
/// devices.
fn rule_matches(text: &str, device: &Device) -> bool {
    let text = text.trim();
    if device.is_mig() {
        return Selector::parse(text).is_some_and(|selector| selector.is_mig() && is_part(&selector, device));
    }
    if let Some(glob) = text.strip_prefix("model:") {
        return glob_matches(glob, &device.name);
    }
    text == "all"
        || text.parse().is_ok_and(|index: u32| index == device.index)
        || (text.starts_with("GPU-") && starts_with(&device.uuid, text))
        || Selector::parse(text) == Some(Selector::BusId(device.bus_id.clone()))
}

/// Whether `request` is for MIG devices. Other selectors then name the GPUs to which the MIG devices belong.
pub fn wants_mig(request: &Request) -> bool {
    let named = matches!(&request.devices, Devices::These(these) if these.iter().any(Selector::is_mig));
    named || request.mig.is_some() || request.mode == Some(Mode::Mig)
}

/// For each device that the container gets, the indices into `inventory.devices` of the possible ones.
///
/// # Errors
/// One line: the selector that matches no device or several.
pub(super) fn slots(request: &Request, world: World<'_>) -> Result<Vec<Vec<usize>>, String> {
    let (mig, inventory) = (wants_mig(request), world.inventory);
    let all = indices(inventory, |device| device.is_mig() == mig);
    if all.is_empty() {
        return Err(if mig { no_mig_message(inventory) } else { "this host has no GPU".to_owned() });
    }
    let fitting = filter_profile(&all, request.mig.as_deref(), inventory)?;
    let kinds = if mig { "MIG devices" } else { "GPUs" };
    let slots = match &request.devices {
        Devices::All => fitting.iter().map(|index| vec![*index]).collect(),
        Devices::Any(count) => match usize::try_from(count.get()) {
            Ok(count) if count <= fitting.len() => vec![fitting; count],
            _ => return Err(format!("{count} {kinds} requested, {} present", fitting.len())),
        },
        Devices::These(selectors) if selectors.len() > inventory.devices.len() => {
            let (asked, have) = (selectors.len(), inventory.devices.len());
            return Err(format!("{asked} {kinds} requested, {have} present"));
        }
        Devices::These(selectors) => {
            let slot = |selector| {
                let found = slot(selector, mig, world)?;
                filter_profile(&found, request.mig.as_deref(), inventory)
            };
            selectors.iter().map(slot).collect::<Result<_, _>>()?
        }
    };
    describe_duplicate(&slots, inventory).map_or(Ok(slots), Err)
}

/// The GPUs whose MIG devices `request` may get, if it names at most one device, and no MIG device.
pub(super) fn mig_hosts<'a>(request: &Request, inventory: &'a Inventory, config: &Config) -> Vec<&'a Device> {
    let Devices::These(selectors) = &request.devices else { return inventory.gpus().collect() };
    let named = selectors.iter().flat_map(|one| matching(one, false, inventory, config));
    named.map(|index| &inventory.devices[index]).filter(|device| !device.is_mig()).collect()
}

/// The indices of the devices that are as `fits` says.
fn indices(inventory: &Inventory, fits: impl Fn(&Device) -> bool) -> Vec<usize> {
    (0..).zip(&inventory.devices).filter(|(_, device)| fits(device)).map(|(index, _)| index).collect()
}

fn no_mig_message(inventory: &Inventory) -> String {
    let capable = if inventory.gpus().any(|gpu| gpu.mig_enabled) {
        "no GPU of this host has any: `sublet mig apply` creates them"
    } else {
        "no GPU of this host is in MIG mode (`sublet mig apply` switches it on): share a whole GPU, with \
         sublet.sm and sublet.memory"
    };
    format!("this needs a MIG device, and {capable}")
}

/// The `devices` with the requested profile.
fn filter_profile(
    devices: &[usize],
    profile: Option<&str>,
    inventory: &Inventory,
) -> Result<Vec<usize>, String> {
    let Some(profile) = profile else { return Ok(devices.to_vec()) };
    let fits = |index: &&usize| inventory.devices[**index].kind() == profile;
    let found: Vec<usize> = devices.iter().filter(fits).copied().collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let have: Vec<String> = devices
        .iter()
        .map(|index| &inventory.devices[*index])
        .map(|device| format!("{} is a {}", device.number(), safe(device.kind())))
        .collect();
    Err(format!("none is a {}: {}", safe(profile), have.join(", ")))
}

/// The devices that `text` names: a selector as in `sublet.gpu`, or `all` GPUs.
pub fn named<'a>(text: &str, inventory: &'a Inventory, config: &Config) -> Vec<&'a Device> {
    if text == "all" {
        return inventory.gpus().collect();
    }
    Selector::parse(text).map(|selector| selected(&selector, inventory, config)).unwrap_or_default()
}

/// The devices that a user means: as [`named`], or with the alias `text`. None is no error.
///
/// # Errors
/// `text` is the beginning of several UUIDs. The message lists the devices.
pub fn meant<'a>(text: &str, inventory: &'a Inventory, config: &Config) -> Result<Vec<&'a Device>, String> {
    let found = named(text, inventory, config);
    let several_do = text == "all" || text.starts_with("name:") || text.starts_with("model:");
    if found.len() > 1 && !several_do {
        return Err(ambiguous(text, &found));
    }
    let is_alias = config.device.iter().any(|rule| rule.name.as_deref() == Some(text));
    if found.is_empty() && is_alias {
        return Ok(named(&format!("name:{text}"), inventory, config));
    }
    Ok(found)
}

/// The message about `text` that names several devices where it may name only one.
pub fn ambiguous(text: &str, found: &[&Device]) -> String {
    format!("{} matches {}: write more of it", safe(text), list(found.iter().copied()))
}

/// `request` for the device `uuid` only, as a CDI device of a share means it.
///
/// # Errors
/// It is not for one device, or not for this one. In messages the text follows the name of either.
pub fn only(
    request: &Request,
    uuid: &str,
    inventory: &Inventory,
    config: &Config,
) -> Result<Request, String> {
    let Some(at) = inventory.devices.iter().position(|device| device.uuid == uuid) else {
        return Err("which this host does not have".to_owned());
    };
    let mig = wants_mig(request);
    if inventory.devices[at].is_mig() != mig {
        let (own, other) = if mig { ("MIG devices", "a GPU") } else { ("GPUs", "a MIG device") };
        return Err(format!("it is for {own}, but this is {other}"));
    }
    if !request.mig_caps.is_empty() {
        return Err("it has sublet.mig-caps, which CDI devices do not support: use annotations".to_owned());
    }
    let one = match &request.devices {
        Devices::Any(count) => count.get() == 1,
        Devices::All => inventory.devices.iter().filter(|device| device.is_mig() == mig).count() == 1,
        Devices::These(selectors) => selectors.len() == 1,
    };
    if !one {
        return Err("it needs several GPUs, and a CDI device has one".to_owned());
    }
    match &request.devices {
        Devices::These(named) if !matching(&named[0], mig, inventory, config).contains(&at) => {
            Err("its sublet.gpu names other GPUs".to_owned())
        }
        _ => {
            let uuid = uuid.to_owned();
            let this = if mig { Selector::MigUuid(uuid) } else { Selector::Uuid(uuid) };
            Ok(Request { devices: Devices::These(vec![this]), ..request.clone() })
        }
    }
}

fn slot(selector: &Selector, mig: bool, world: World<'_>) -> Result<Vec<usize>, String> {
    let World { inventory, config, .. } = world;
    let found = matching(selector, mig, inventory, config);
    let of_gpu = mig && !selector.is_mig();
    let several_do = of_gpu || matches!(selector, Selector::Name(_) | Selector::Model(_));
    let kind = if mig { "MIG device" } else { "GPU" };
    if found.is_empty() {
        return Err(format!(
            "no {kind} of this host is {}{}; it has {}",
            if of_gpu { "on the GPU " } else { "" },
            describe(selector),
            list(inventory.devices.iter().filter(|device| device.is_mig() == mig))
        ));
    }
    if found.len() > 1 && !several_do {
        let found: Vec<&Device> = found.iter().map(|index| &inventory.devices[*index]).collect();
        return Err(ambiguous(&describe(selector), &found));
    }
    Ok(found)
}

/// The devices that `selector` names.
pub(crate) fn selected<'a>(
    selector: &Selector,
    inventory: &'a Inventory,
    config: &Config,
) -> Vec<&'a Device> {
    let found = matching(selector, selector.is_mig(), inventory, config);
    found.into_iter().map(|index| &inventory.devices[index]).collect()
}

/// The devices that `selector` names. With `mig`, the MIG devices that it names or whose GPU it names.
fn matching(selector: &Selector, mig: bool, inventory: &Inventory, config: &Config) -> Vec<usize> {
    let fits = |device: &Device| match selector {
        Selector::MigUuid(_) | Selector::MigIndex(..) => is_part(selector, device),
        Selector::Name(name) => {
            let has =
                |device: &Device| rule(device, config).is_some_and(|rule| rule.name.as_ref() == Some(name));
            // An alias may name either.
            has(device) || device.is_mig() && mig && inventory.device(device.gpu()).is_some_and(has)
        }
        _ if device.is_mig() != mig => false,
        _ => is_named_by(selector, device),
    };
    let found = indices(inventory, fits);
    // A complete UUID names its own device, even if another UUID begins with it.
    let whole = |index: &usize| match (selector, &inventory.devices[*index]) {
        (Selector::Uuid(uuid), device) => device.gpu().eq_ignore_ascii_case(uuid),
        (Selector::MigUuid(uuid), device) => device.uuid.eq_ignore_ascii_case(uuid),
        _ => false,
    };
    if found.iter().any(whole) { found.into_iter().filter(whole).collect() } else { found }
}

/// Whether `selector` names `device` or its GPU by the GPU's properties.
fn is_named_by(selector: &Selector, device: &Device) -> bool {
    match selector {
        Selector::Index(index) => device.index == *index,
        Selector::Uuid(uuid) => starts_with(device.gpu(), uuid),
        Selector::BusId(id) => *id == device.bus_id,
        Selector::Model(glob) => glob_matches(glob, &device.name),
        Selector::MigIndex(gpu, _) => device.index == *gpu,
        Selector::MigUuid(_) => device.mig_enabled,
        Selector::Name(_) => false,
    }
}

/// The left-out GPUs that `request` could have.
pub(super) fn left_out<'a>(request: &Request, world: World<'a>) -> impl Iterator<Item = &'a LeftOut> {
    let named = move |selector: &Selector, gpu: &Device| match selector {
        Selector::Name(name) => rule(gpu, world.config).is_some_and(|rule| rule.name.as_ref() == Some(name)),
        selector => is_named_by(selector, gpu),
    };
    world.inventory.left_out.iter().filter(move |gone| match &request.devices {
        Devices::Any(_) | Devices::All => gone.gpu.mig_enabled || !wants_mig(request),
        Devices::These(selectors) => selectors.iter().any(|selector| named(selector, &gone.gpu)),
    })
}

/// Whether `device` is the MIG device that `selector` names.
fn is_part(selector: &Selector, device: &Device) -> bool {
    let Some(mig_device) = &device.mig_device else { return false };
    match selector {
        Selector::MigIndex(gpu, index) => (device.index, mig_device.index) == (*gpu, *index),
        Selector::MigUuid(text) => match text.strip_prefix("MIG-GPU-") {
            Some(_) => text[4..]
                .eq_ignore_ascii_case(&format!("{}/{}/{}", mig_device.gpu, mig_device.gi, mig_device.ci)),
            None => starts_with(&device.uuid, text),
        },
        _ => false,
    }
}

/// The message about a device that is the only choice of two selectors, or about two devices that no process sees
/// together.
fn describe_duplicate(slots: &[Vec<usize>], inventory: &Inventory) -> Option<String> {
    let mut named: Vec<usize> = slots.iter().filter(|slot| slot.len() == 1).map(|slot| slot[0]).collect();
    named.sort_unstable();
    let devices: Vec<&Device> = named.iter().map(|index| &inventory.devices[*index]).collect();
    if let Some(pair) = devices.windows(2).find(|pair| pair[0].uuid == pair[1].uuid) {
        return Some(format!("{} is named twice", pair[0].label()));
    }
    if devices.iter().any(|device| device.is_mig()) && devices.iter().any(|device| !device.is_mig()) {
        return Some("a process sees either GPUs or MIG devices: name one kind".to_owned());
    }
    // Compute instances of one GPU instance are adjacent.
    let instance = |device: &Device| {
        device.mig_device.as_ref().map(|mig_device| (mig_device.gpu.clone(), mig_device.gi))
    };
    let pair = devices.windows(2).find(|pair| pair[0].is_mig() && instance(pair[0]) == instance(pair[1]))?;
    Some(format!(
        "{} and {} are compute instances of one GPU instance, and a process sees only one of these",
        pair[0].label(),
        pair[1].label()
    ))
}

fn describe(selector: &Selector) -> String {
    match selector {
        Selector::Index(index) => format!("number {index}"),
        Selector::MigIndex(gpu, mig) => format!("{gpu}:{mig}"),
        Selector::Uuid(text) | Selector::BusId(text) | Selector::MigUuid(text) => safe(text),
        Selector::Name(name) => format!("name:{} (see [[device]] in the configuration)", safe(name)),
        Selector::Model(glob) => format!("model:{}", safe(glob)),
    }
}

fn list<'a>(devices: impl Iterator<Item = &'a Device>) -> String {
    let name =
        |device: &Device| format!("{} ({}, {})", device.label(), safe(device.kind()), safe(&device.uuid));
    devices.map(name).collect::<Vec<_>>().join(", ")
}

fn starts_with(text: &str, beginning: &str) -> bool {
    text.get(..beginning.len()).is_some_and(|start| start.eq_ignore_ascii_case(beginning))
}

/// Gives each slot a different device, preferring those early in `ranked`; `None` if that is impossible.
///
/// Bipartite matching by augmenting paths: overlapping selectors do not take each other's only choice.
pub(super) fn assign(slots: &[Vec<usize>], ranked: &[usize]) -> Option<Vec<usize>> {
    let choices: Vec<Vec<usize>> = slots
        .iter()
        .map(|slot| ranked.iter().copied().filter(|device| slot.contains(device)).collect())
        .collect();
    let mut holder: Vec<(usize, usize)> = Vec::with_capacity(slots.len());
    for slot in 0..slots.len() {
        if !augment(slot, &choices, &mut holder, &mut Vec::new()) {
            return None;
        }
    }
    holder.sort_unstable_by_key(|(_, slot)| *slot);
    Some(holder.into_iter().map(|(device, _)| device).collect())
}

/// Finds a device for `slot`, moving earlier slots that have another choice. `holder`: (device, slot).
fn augment(
    slot: usize,
    choices: &[Vec<usize>],
    holder: &mut Vec<(usize, usize)>,
    seen: &mut Vec<usize>,
) -> bool {
    for device in &choices[slot] {
        if seen.contains(device) {
            continue;
        }
        seen.push(*device);
        match holder.iter().position(|(held, _)| held == device) {
            None => {
                holder.push((*device, slot));
                return true;
            }
            Some(at) => {
                let other = holder[at].1;
                if augment(other, choices, holder, seen) {
                    // `other` pushed its new device: this one is now `slot`'s.
                    holder[at].1 = slot;
                    return true;
                }
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{device, host, request};
    use super::*;
    use crate::ledger::Ledger;

    fn three() -> Inventory {
        let mut devices: Vec<Device> = (0..3).map(device).collect();
        devices[0].uuid = "GPU-aa11".into();
        devices[1].uuid = "GPU-aa22".into();
        devices[2].uuid = "GPU-aa".into();
        devices[2].name = "NVIDIA A100-SXM4-40GB".into();
        host(devices)
    }

    fn wish(selectors: Vec<Selector>) -> Request {
        Request { devices: Devices::These(selectors), ..request(Mode::TimeSlice) }
    }

    fn slots_of(request: &Request, config: &Config) -> Result<Vec<Vec<usize>>, String> {
        slots(request, World { inventory: &three(), ledger: &Ledger::empty("boot"), config })
    }

    fn these(selectors: Vec<Selector>) -> Result<Vec<Vec<usize>>, String> {
        slots_of(&wish(selectors), &Config::default())
    }

    #[test]
    fn every_selector_finds_its_device() {
        let found = |selector| these(vec![selector]).unwrap();
        assert_eq!(found(Selector::Index(1)), [[1]]);
        assert_eq!(found(Selector::Uuid("gpu-AA22".into())), [[1]]);
        assert_eq!(found(Selector::Uuid("GPU-aa1".into())), [[0]]);
        assert_eq!(found(Selector::Uuid("GPU-aa".into())), [[2]], "a whole one beats a beginning");
        for id in ["11:00.0", "0000:11:00.0", "00000000:11:00.0"] {
            assert_eq!(found(Selector::parse(id).unwrap()), [[1]]);
        }
        assert_eq!(found(Selector::Model("*a100*".into())), [[2]]);
        assert_eq!(found(Selector::Model("NVIDIA H?00".into())), [[0, 1]]);
    }

    #[test]
    fn what_names_no_device_or_several_is_refused() {
        let why = |selectors| these(selectors).unwrap_err();
        assert_eq!(
            why(vec![Selector::Index(7)]),
            "no GPU of this host is number 7; it has GPU 0 (NVIDIA H200, GPU-aa11), GPU 1 (NVIDIA H200, \
             GPU-aa22), GPU 2 (NVIDIA A100-SXM4-40GB, GPU-aa)"
        );
        let several = "matches GPU 0 (NVIDIA H200, GPU-aa11), GPU 1 (NVIDIA H200, GPU-aa22), GPU 2 (NVIDIA \
                       A100-SXM4-40GB, GPU-aa): write more of it";
        assert_eq!(why(vec![Selector::Uuid("GPU-a".into())]), format!("GPU-a {several}"));
        assert_eq!(why(vec![Selector::Index(0), Selector::Uuid("GPU-aa11".into())]), "GPU 0 is named twice");
        assert_eq!(why(vec![Selector::Index(0); 4]), "4 GPUs requested, 3 present");
        assert!(why(vec![Selector::Name("big".into())]).starts_with("no GPU of this host is name:big"));
    }

    #[test]
    fn commands_take_a_device_by_any_of_its_names() {
        let mut host = three();
        host.devices[0].uuid = "GPU-aaaa1111-00".into();
        host.devices[1].uuid = "GPU-aaaa1111-22".into();
        let alias = |matches: &str, name: &str| DeviceRule {
            matches: matches.into(),
            name: Some(name.into()),
            fixed_use: None,
            time_slice: None,
        };
        let config = Config { device: vec![alias("1", "left"), alias("2", "left")], ..Config::default() };
        let meant = |text: &str| {
            meant(text, &host, &config).map(|found| found.iter().map(|one| one.index).collect::<Vec<_>>())
        };
        for text in ["1", "GPU-aaaa1111-2", "11:00.0", "GPU-AAAA1111-22"] {
            assert_eq!(meant(text), Ok(vec![1]), "{text}");
        }
        for text in ["left", "name:left"] {
            assert_eq!(meant(text), Ok(vec![1, 2]), "{text}");
        }
        assert_eq!((meant("all"), meant("right")), (Ok(vec![0, 1, 2]), Ok(vec![])));
        let several = "GPU-aaaa1111 matches GPU 0 (NVIDIA H200, GPU-aaaa1111-00), GPU 1 (NVIDIA H200, GPU-aaaa1111-22): \
                       write more of it";
        assert_eq!(meant("GPU-aaaa1111"), Err(several.to_owned()));
    }

    #[test]
    fn rules_name_devices_and_the_first_that_matches_counts() {
        let rule_of = |matches: &str, name: &str| DeviceRule {
            matches: matches.into(),
            name: Some(name.into()),
            fixed_use: None,
            time_slice: None,
        };
        let device_rules =
            vec![rule_of("model:*A100*", "old"), rule_of("1", "second"), rule_of("all", "rest")];
        let config = Config { device: device_rules, ..Config::default() };
        let named = |name: &str| slots_of(&wish(vec![Selector::Name(name.into())]), &config);
        assert_eq!(named("old").unwrap(), [[2]]);
        assert_eq!(named("second").unwrap(), [[1]]);
        assert_eq!(named("rest").unwrap(), [[0]]);
    }

    #[test]
    fn a_wide_selector_leaves_a_narrow_one_its_only_choice() {
        assert_eq!(assign(&[vec![0, 1, 2], vec![0]], &[0, 1, 2]), Some(vec![1, 0]));
        assert_eq!(assign(&[vec![0, 1], vec![0, 1]], &[1, 0]), Some(vec![0, 1]));
        assert_eq!(assign(&[vec![0, 1], vec![0, 1]], &[1]), None);
        assert_eq!(assign(&[vec![0, 1, 2]], &[2, 1, 0]), Some(vec![2]));
    }
}
