//! From selectors to devices: which ones a request may have, and which of those it takes.

use crate::config::{Config, DeviceRule};
use crate::glob::glob_matches;
use crate::inventory::{Device, Inventory};
use crate::request::{Devices, Request, Selector};
use crate::text::safe;

/// The first rule of the configuration that matches `device`.
#[must_use]
pub fn rule<'a>(device: &Device, config: &'a Config) -> Option<&'a DeviceRule> {
    config.device.iter().find(|rule| rule_matches(&rule.matches, device))
}

/// `[[device]] match`: a selector as in `sublet.gpu`, or `all`.
fn rule_matches(text: &str, device: &Device) -> bool {
    let text = text.trim();
    if let Some(glob) = text.strip_prefix("model:") {
        return glob_matches(glob, &device.name);
    }
    text == "all"
        || text.parse().is_ok_and(|index: u32| index == device.index)
        || (text.starts_with("GPU-") && starts_with(&device.uuid, text))
        || bus_id(text).is_some_and(|id| Some(id) == bus_id(&device.bus_id))
}

/// For each device that the container gets, the indices into `inventory.devices` of those that would do.
///
/// # Errors
/// One line: what names no device or more than one.
pub(super) fn slots(
    devices: &Devices,
    inventory: &Inventory,
    config: &Config,
) -> Result<Vec<Vec<usize>>, String> {
    let all: Vec<usize> = (0..inventory.devices.len()).collect();
    let slots = match devices {
        Devices::All => all.iter().map(|index| vec![*index]).collect(),
        Devices::Any(count) => match usize::try_from(count.get()) {
            Ok(count) if count <= all.len() => vec![all.clone(); count],
            _ => return Err(format!("{count} devices were asked for, and there are {}", all.len())),
        },
        Devices::These(selectors) if selectors.len() > all.len() => {
            return Err(format!("{} devices were asked for, and there are {}", selectors.len(), all.len()));
        }
        Devices::These(selectors) => {
            selectors.iter().map(|selector| slot(selector, inventory, config)).collect::<Result<_, _>>()?
        }
    };
    if slots.is_empty() {
        return Err("this host has no GPU".to_owned());
    }
    twice(&slots, inventory).map_or(Ok(slots), Err)
}

/// The devices that a person means by `text`: a selector as in `sublet.gpu`, or `all`.
#[must_use]
pub fn named<'a>(text: &str, inventory: &'a Inventory, config: &Config) -> Vec<&'a Device> {
    if text == "all" {
        return inventory.devices.iter().collect();
    }
    let found = Selector::parse(text).map(|selector| matching(&selector, inventory, config));
    found.unwrap_or_default().into_iter().map(|index| &inventory.devices[index]).collect()
}

/// `request` for the device `uuid` and no other, as a CDI device of a share means it.
///
/// # Errors
/// It is not for one device, or not for this one; follows the name of either.
pub fn only(
    request: &Request,
    uuid: &str,
    inventory: &Inventory,
    config: &Config,
) -> Result<Request, String> {
    let Some(at) = inventory.devices.iter().position(|device| device.uuid == uuid) else {
        return Err("which this host does not have".to_owned());
    };
    let one = match &request.devices {
        Devices::Any(count) => count.get() == 1,
        Devices::All => inventory.devices.len() == 1,
        Devices::These(selectors) => selectors.len() == 1,
    };
    if !one {
        return Err("it takes several GPUs, and a CDI device is of one".to_owned());
    }
    match &request.devices {
        Devices::These(named)
            if !named[0].is_mig() && !matching(&named[0], inventory, config).contains(&at) =>
        {
            Err("its sublet.gpu names other GPUs".to_owned())
        }
        Devices::These(named) if named[0].is_mig() => Ok(request.clone()),
        _ => {
            Ok(Request { devices: Devices::These(vec![Selector::Uuid(uuid.to_owned())]), ..request.clone() })
        }
    }
}

fn slot(selector: &Selector, inventory: &Inventory, config: &Config) -> Result<Vec<usize>, String> {
    let found = matching(selector, inventory, config);
    let several_do = matches!(selector, Selector::Name(_) | Selector::Model(_));
    match found.len() {
        0 => Err(format!("no GPU here is {}; this host has {}", describe(selector), listing(inventory))),
        1 => Ok(found),
        _ if several_do => Ok(found),
        count => Err(format!("{} names {count} GPUs: write more of it", describe(selector))),
    }
}

fn matching(selector: &Selector, inventory: &Inventory, config: &Config) -> Vec<usize> {
    let fits = |device: &Device| match selector {
        Selector::Index(index) => device.index == *index,
        Selector::Uuid(uuid) => starts_with(&device.uuid, uuid),
        Selector::BusId(id) => bus_id(id).is_some_and(|id| Some(id) == bus_id(&device.bus_id)),
        Selector::Name(name) => rule(device, config).is_some_and(|rule| rule.name.as_ref() == Some(name)),
        Selector::Model(glob) => glob_matches(glob, &device.name),
        Selector::MigUuid(_) | Selector::MigIndex(..) => false,
    };
    let found: Vec<usize> =
        (0..).zip(&inventory.devices).filter(|(_, device)| fits(device)).map(first).collect();
    // A whole UUID that another one begins with names its own device.
    let whole = |index: &&usize| match selector {
        Selector::Uuid(uuid) => inventory.devices[**index].uuid.eq_ignore_ascii_case(uuid),
        _ => false,
    };
    found.iter().find(whole).map(|index| vec![*index]).unwrap_or(found)
}

fn first<A, B>(pair: (A, B)) -> A {
    pair.0
}

/// A device that is the only choice of two selectors.
fn twice(slots: &[Vec<usize>], inventory: &Inventory) -> Option<String> {
    let mut named: Vec<usize> = slots.iter().filter(|slot| slot.len() == 1).map(|slot| slot[0]).collect();
    named.sort_unstable();
    let pair = named.windows(2).find(|pair| pair[0] == pair[1])?;
    Some(format!("GPU {} is named twice", inventory.devices[pair[0]].index))
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

fn listing(inventory: &Inventory) -> String {
    let name =
        |device: &Device| format!("GPU {} ({}, {})", device.index, safe(&device.name), safe(&device.uuid));
    inventory.devices.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn starts_with(text: &str, beginning: &str) -> bool {
    text.get(..beginning.len()).is_some_and(|start| start.eq_ignore_ascii_case(beginning))
}

/// Domain, bus, device and function, whatever width they are written in: `3b:00.0` is `00000000:3B:00.0`.
fn bus_id(text: &str) -> Option<(u32, u32, u32, u32)> {
    let hex = |part: &str| u32::from_str_radix(part, 16).ok();
    let (rest, function) = text.split_once('.')?;
    let mut parts = rest.rsplit(':');
    let (device, bus, domain) = (parts.next()?, parts.next()?, parts.next().unwrap_or("0"));
    let id = (hex(domain)?, hex(bus)?, hex(device)?, hex(function)?);
    parts.next().is_none().then_some(id)
}

/// Gives each slot a device of its own, the earlier in `ranked` the better; `None` where that cannot be.
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
    Some(holder.into_iter().map(first).collect())
}

/// Finds `slot` a device, moving earlier slots where they have another choice. `holder`: (device, slot).
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
    use super::super::fixture::{device, host};
    use super::*;

    fn three() -> Inventory {
        let mut devices: Vec<Device> = (0..3).map(device).collect();
        devices[0].uuid = "GPU-aa11".into();
        devices[1].uuid = "GPU-aa22".into();
        devices[2].uuid = "GPU-aa".into();
        devices[2].name = "NVIDIA A100-SXM4-40GB".into();
        host(devices)
    }

    fn these(selectors: Vec<Selector>) -> Result<Vec<Vec<usize>>, String> {
        slots(&Devices::These(selectors), &three(), &Config::default())
    }

    #[test]
    fn every_selector_finds_its_device() {
        let found = |selector| these(vec![selector]).unwrap();
        assert_eq!(found(Selector::Index(1)), [[1]]);
        assert_eq!(found(Selector::Uuid("gpu-AA22".into())), [[1]]);
        assert_eq!(found(Selector::Uuid("GPU-aa1".into())), [[0]]);
        assert_eq!(found(Selector::Uuid("GPU-aa".into())), [[2]], "a whole one beats a beginning");
        for id in ["11:00.0", "0000:11:00.0", "00000000:11:00.0"] {
            assert_eq!(found(Selector::BusId(id.into())), [[1]]);
        }
        assert_eq!(found(Selector::Model("*a100*".into())), [[2]]);
        assert_eq!(found(Selector::Model("NVIDIA H?00".into())), [[0, 1]]);
    }

    #[test]
    fn what_names_no_device_or_several_is_refused() {
        let why = |selectors| these(selectors).unwrap_err();
        assert_eq!(
            why(vec![Selector::Index(7)]),
            "no GPU here is number 7; this host has GPU 0 (NVIDIA H200, GPU-aa11), \
             GPU 1 (NVIDIA H200, GPU-aa22), GPU 2 (NVIDIA A100-SXM4-40GB, GPU-aa)"
        );
        assert_eq!(why(vec![Selector::Uuid("GPU-a".into())]), "GPU-a names 3 GPUs: write more of it");
        assert_eq!(why(vec![Selector::Index(0), Selector::Uuid("GPU-aa11".into())]), "GPU 0 is named twice");
        assert_eq!(why(vec![Selector::Index(0); 4]), "4 devices were asked for, and there are 3");
        assert!(why(vec![Selector::Name("big".into())]).starts_with("no GPU here is name:big"));
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
        let named = |name: &str| slots(&Devices::These(vec![Selector::Name(name.into())]), &three(), &config);
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
