//! From a layout to the target of each GPU of this host: resolves selectors, profile names and counts.

use super::layout::{Entry, Layout, Wish};
use super::{Gpu, Instance, Profile, Span, device_name};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::place::meant;
use sublet_core::text::{nearest, safe, safe_path};

/// The target of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// `GPU-…`.
    pub gpu: String,
    /// MIG mode.
    pub on: bool,
    /// All its instances.
    pub want: Vec<Want>,
}

/// One GPU instance that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// Its profile's id.
    pub profile: u32,
    /// The start of its place; `None` if any place will do.
    pub start: Option<u32>,
    /// Compute slices of its compute instances, smallest first.
    pub compute: Vec<u32>,
}

impl Want {
    /// The want that describes `one` as it is.
    pub fn of(one: &Instance) -> Self {
        let mut compute: Vec<u32> = one.compute.iter().map(|part| part.slices).collect();
        compute.sort_unstable();
        Self { profile: one.profile, start: Some(one.span.start), compute }
    }
}

impl Target {
    /// This target, plus the instances of `gpu` at `spans` as they are.
    pub fn beside(&self, gpu: &Gpu, spans: &[Span]) -> Self {
        let there = gpu.instances.iter().filter(|one| spans.contains(&one.span)).map(Want::of);
        let want = self.want.iter().cloned().chain(there.filter(|_| self.on)).collect();
        Self { want, ..self.clone() }
    }
}

/// The targets of the GPUs that `layout` names, by NVML's index. GPUs that it does not name stay as they are.
///
/// # Errors
/// A GPU does not exist (in mig-parted's files: on no host, and one that is left out is passed over), does not answer, is named twice, or lacks a profile; the message names file and line.
pub fn targets(
    layout: &Layout,
    gpus: &[Gpu],
    inventory: &Inventory,
    config: &Config,
) -> anyhow::Result<Vec<Target>> {
    let mut found: Vec<(Target, usize)> = Vec::new();
    for entry in &layout.entries {
        for gpu in selected(layout, entry, gpus, inventory, config)? {
            if let Some((_, line)) = found.iter().find(|(target, _)| target.gpu == gpu.uuid) {
                let text = format!("{} is already named in line {line}: name each GPU once", gpu.label());
                return Err(layout.error(entry.line, &text));
            }
            let mut want = Vec::new();
            // A GPU without MIG support has no profiles; planning reports that.
            for wish in entry.instances.iter().filter(|_| gpu.mode.is_some()) {
                want.extend(std::iter::repeat_n(wanted(layout, wish, gpu)?, wish.count));
            }
            found.push((Target { gpu: gpu.uuid.clone(), on: entry.mig, want }, entry.line));
        }
    }
    let index = |uuid: &str| gpus.iter().position(|gpu| gpu.uuid == uuid);
    found.sort_by_key(|(target, _)| index(&target.gpu));
    Ok(found.into_iter().map(|(target, _)| target).collect())
}

/// The GPUs that `layout` means, also those that are left out, and of which there is no target, because they are none of the `gpus`
/// that tell something. What another GPU of the model is, by its PCI id, such a one is taken for.
pub(crate) fn silent(layout: &Layout, gpus: &[Gpu], inventory: &Inventory, config: &Config) -> Vec<Device> {
    let all = inventory.with_left_out();
    let mut found: Vec<Device> = Vec::new();
    for entry in &layout.entries {
        let named = entry.devices.iter().flat_map(|name| meant(name, &all, config).unwrap_or_default());
        for device in named {
            let is_known = gpus.iter().any(|gpu| gpu.uuid == device.uuid)
                || found.iter().any(|other| other.uuid == device.uuid);
            let alike = gpus.iter().find(|gpu| gpu.name == device.name);
            if !is_known && alike.is_none_or(|gpu| lets_through(entry, gpu)) {
                found.push(device.clone());
            }
        }
    }
    found
}

/// Whether the `device-filter` of `entry`, if it has one, means `gpu`.
fn lets_through(entry: &Entry, gpu: &Gpu) -> bool {
    entry.pci_devices.as_ref().is_none_or(|ids| ids.contains(&gpu.pci_device))
}

fn selected<'g>(
    layout: &Layout,
    entry: &Entry,
    gpus: &'g [Gpu],
    inventory: &Inventory,
    config: &Config,
) -> anyhow::Result<Vec<&'g Gpu>> {
    let mut selected: Vec<&Gpu> = Vec::new();
    let mut missing = Vec::new();
    for name in &entry.devices {
        let devices = meant(name, inventory, config).map_err(|why| layout.error(entry.line, &why))?;
        // An entry for a model that this host lacks is for other hosts with the same file.
        let is_general = name.starts_with("model:") || name == "all";
        if devices.is_empty() && !is_general {
            let all = inventory.with_left_out();
            let is_left_out = meant(name, &all, config).is_ok_and(|found| !found.is_empty());
            // mig-parted looks at each GPU that is there: one file is for hosts of 8 and of 2. That a GPU is left out now is
            // no fault of the layout's.
            if layout.is_parteds() || is_left_out {
                missing.push(safe(name));
                continue;
            }
            let have = gpus.iter().map(|gpu| format!("{} ({})", gpu.label(), safe(&gpu.uuid)));
            let (name, have) = (safe(name), have.collect::<Vec<_>>().join(", "));
            return Err(layout.error(entry.line, &format!("no GPU of this host is {name}; it has {have}")));
        }
        for device in devices {
            let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == device.uuid) else {
                // Whoever looked has warned of it.
                if is_general {
                    continue;
                }
                let text = format!("{} does not tell its profiles or instances", device.label());
                return Err(layout.error(entry.line, &text));
            };
            if selected.iter().any(|known| known.uuid == gpu.uuid) {
                return Err(layout.error(entry.line, &format!("{} is named twice", gpu.label())));
            }
            selected.push(gpu);
        }
    }
    if !missing.is_empty() {
        let (path, named) = (safe_path(&layout.path), missing.join(", "));
        tracing::warn!("layout {path}:{}: this host serves no GPU {named}; the others are done", entry.line);
    }
    selected.retain(|gpu| lets_through(entry, gpu));
    Ok(selected)
}

fn wanted(layout: &Layout, wish: &Wish, gpu: &Gpu) -> anyhow::Result<Want> {
    let profile = gpu.profiles.iter().find(|profile| profile.name == wish.profile);
    let profile = profile.ok_or_else(|| layout.error(wish.line, &unknown(&wish.profile, gpu)))?;
    let size = |part: &String| {
        slices(part, profile).ok_or_else(|| {
            let known: Vec<_> = (1..=profile.slices).map(|slices| device_name(profile, slices)).collect();
            let (name, part, known) = (&profile.name, safe(part), known.join(", "));
            let text = format!("a {name} cannot have a compute instance {part}: it can have {known}");
            layout.error(wish.line, &text)
        })
    };
    let mut compute = match &wish.compute {
        None => vec![profile.slices],
        Some(parts) => parts.iter().map(size).collect::<Result<_, _>>()?,
    };
    compute.sort_unstable();
    Ok(Want { profile: profile.id, start: wish.start, compute })
}

/// The compute slices of `1c.2g.35gb` or, within its GPU instance, of `1c`. The profile's own name means all slices.
fn slices(part: &str, profile: &Profile) -> Option<u32> {
    if part == profile.name {
        return Some(profile.slices);
    }
    let (slices, rest) = part.split_once('c')?;
    let slices: u32 = slices.parse().ok()?;
    let same = rest.is_empty() || rest.strip_prefix('.') == Some(&profile.name);
    (same && (1..=profile.slices).contains(&slices)).then_some(slices)
}

/// An error that suggests the probable meaning: another tool's spelling first, then the nearest name.
pub(super) fn unknown(name: &str, gpu: &Gpu) -> String {
    let known: Vec<&str> = gpu.profiles.iter().map(|profile| profile.name.as_str()).collect();
    let plain = name.trim().to_ascii_lowercase();
    let plain = plain.strip_prefix("mig ").or_else(|| plain.strip_prefix("mig-")).unwrap_or(&plain).trim();
    let hint = match plain.split_once("c.") {
        Some((slices, whole)) if slices.parse::<u32>().is_ok() && known.contains(&whole) => {
            format!("; write profile = \"{whole}\", compute = [\"{slices}c\"]")
        }
        _ => nearest(plain, known.iter().copied())
            .map(|near| format!("; did you mean {near}?"))
            .unwrap_or_default(),
    };
    let (label, model, known) = (gpu.label(), safe(&gpu.name), known.join(", "));
    format!("{label} ({model}) has no profile {}{hint} (it has {known})", safe(name))
}

#[cfg(test)]
#[path = "layout_target_tests.rs"]
mod tests;
