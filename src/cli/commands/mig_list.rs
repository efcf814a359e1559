//! `sublet mig list`: the MIG instances of each GPU, and the profiles it offers.

use schemars::JsonSchema;
use serde::Serialize;

use super::tables::{self, Column, Format};
use crate::mig::{Compute, Gpu, Instance, Mode, Nvml, Profile, Span};
use sublet_core::config::Config;
use sublet_core::inventory::Inventory;
use sublet_core::ledger::Ledger;
use sublet_core::text::safe;

/// Runs it.
pub fn run(format: Format, config: &Config) -> anyhow::Result<()> {
    let (gpus, ..) = seen(config)?;
    let listed: Vec<_> = gpus.iter().map(ListedGpu::of).collect();
    tables::print(format, &listed, || tables(&listed, tables::terminal_width()))
}

/// The host's GPUs with the users of their instances, and what tells of them.
pub fn seen(config: &Config) -> anyhow::Result<(Vec<Gpu>, Inventory, Ledger)> {
    let ledger = super::settled_ledger(config)?;
    let inventory = sublet_core::admit::fresh_inventory(config)?;
    Ok((Nvml::open(config, &inventory)?.seen(&inventory, &ledger)?, inventory, ledger))
}

/// What is printed of a GPU as JSON.
#[derive(Serialize, JsonSchema)]
pub struct ListedGpu<'a> {
    uuid: &'a str,
    /// NVML's.
    index: u32,
    name: &'a str,
    /// MIG mode; null: the GPU has none.
    mig: Option<Mode>,
    /// The GPU instances that the GPU offers.
    profiles: &'a [Profile],
    instances: Vec<ListedInstance<'a>>,
}

/// A GPU instance.
#[derive(Serialize, JsonSchema)]
struct ListedInstance<'a> {
    /// Its id.
    gi: u32,
    profile: String,
    placement: Span,
    /// Its compute instances.
    compute: Vec<ListedPart<'a>>,
    /// The lease or process that uses all of it.
    #[serde(skip)]
    held_by: Option<&'a str>,
}

/// A compute instance: a MIG device.
#[derive(Serialize, JsonSchema)]
struct ListedPart<'a> {
    uuid: &'a str,
    /// Its id in the GPU instance.
    ci: u32,
    profile: String,
    /// The compute slices of the GPU instance that it has.
    placement: Span,
    /// The lease or process that uses it.
    held_by: Option<&'a str>,
}

impl<'a> ListedGpu<'a> {
    fn of(gpu: &'a Gpu) -> Self {
        Self {
            uuid: &gpu.uuid,
            index: gpu.index,
            name: &gpu.name,
            mig: gpu.mode,
            profiles: &gpu.profiles,
            instances: gpu.instances.iter().map(|one| ListedInstance::of(gpu, one)).collect(),
        }
    }
}

impl<'a> ListedInstance<'a> {
    fn of(gpu: &Gpu, one: &'a Instance) -> Self {
        let part = |part: &'a Compute| ListedPart {
            uuid: &part.uuid,
            ci: part.ci,
            profile: gpu.device_name(one.profile, part.slices),
            placement: part.span,
            held_by: part.held.as_deref().or(one.held.as_deref()),
        };
        Self {
            gi: one.gi,
            placement: one.span,
            compute: one.compute.iter().map(part).collect(),
            profile: gpu.profile_name(one.profile),
            held_by: one.held.as_deref(),
        }
    }
}

fn tables(gpus: &[ListedGpu<'_>], width: Option<usize>) -> String {
    let word = |on: bool| if on { "on" } else { "off" };
    let mode = |gpu: &ListedGpu<'_>| match &gpu.mig {
        None => "not supported".to_owned(),
        Some(mode) if mode.current == mode.pending => word(mode.current).to_owned(),
        Some(mode) => format!("{}, {} after a reset", word(mode.current), word(mode.pending)),
    };
    let rows = grouped(gpus, |gpu| vec![vec![safe(gpu.name), mode(gpu)]]);
    let mut parts = vec![tables::table(&["GPU", "NAME", "MIG MODE"], rows)];
    let profiles = grouped(gpus, |gpu| gpu.profiles.iter().map(profile_row).collect());
    let instances: Vec<_> =
        gpus.iter().flat_map(|gpu| gpu.instances.iter().flat_map(|one| instance_rows(gpu, one))).collect();
    let rest = [
        (["GPU", "PROFILE", "ID", "FREE/TOTAL", "SMS", "MEMORY", "PLACEMENTS"], profiles),
        (["GPU", "GI", "CI", "PROFILE", "PLACEMENT", "UUID", "HELD BY"], instances),
    ];
    let rest = rest.into_iter().filter(|(_, rows)| !rows.is_empty());
    // The longest column goes first where a terminal is too narrow.
    let column = |name| Column(name, u8::from(["PLACEMENTS", "UUID"].contains(&name)));
    parts.extend(rest.map(|(header, rows)| tables::fitting(&header.map(column), &rows, width)));
    parts.join("\n\n")
}

/// The rows of each GPU, with its index before them. GPUs whose rows are equal have them once.
fn grouped(gpus: &[ListedGpu<'_>], rows: impl Fn(&ListedGpu<'_>) -> Vec<Vec<String>>) -> Vec<Vec<String>> {
    let mut groups: Vec<(Vec<u32>, Vec<Vec<String>>)> = Vec::new();
    for gpu in gpus {
        let own = rows(gpu);
        match groups.iter_mut().find(|(_, rows)| *rows == own) {
            Some((indices, _)) => indices.push(gpu.index),
            None => groups.push((vec![gpu.index], own)),
        }
    }
    let range = |run: &[u32]| match run {
        [first, .., last] => format!("{first}-{last}"),
        one => one.iter().map(u32::to_string).collect(),
    };
    let named = |(indices, rows): (Vec<u32>, Vec<Vec<String>>)| {
        // `0-3,6` for 0, 1, 2, 3 and 6.
        let runs = indices.chunk_by(|one, next| one + 1 == *next);
        let name = runs.map(range).collect::<Vec<_>>().join(",");
        rows.into_iter().map(move |row| [vec![name.clone()], row].concat())
    };
    groups.into_iter().flat_map(named).collect()
}

/// Placements in nvidia-smi's notation: `{0,2,4}:2`.
fn profile_row(one: &Profile) -> Vec<String> {
    let starts: Vec<_> = one.placements.iter().map(|at| at.start.to_string()).collect();
    let size = one.placements.first().map_or(0, |at| at.size);
    vec![
        safe(&one.name),
        one.id.to_string(),
        format!("{}/{}", one.free, one.instances),
        one.sms.to_string(),
        format!("{} MiB", one.memory_mib),
        format!("{{{}}}:{size}", starts.join(",")),
    ]
}

/// One row per compute instance, or one row that says that there is none.
fn instance_rows(gpu: &ListedGpu<'_>, one: &ListedInstance<'_>) -> Vec<Vec<String>> {
    let row = |ci: String, profile: &str, uuid: &str, held: Option<&str>| {
        let (gpu, gi, placement) = (gpu.index.to_string(), one.gi.to_string(), one.placement.to_string());
        vec![gpu, gi, ci, profile.to_owned(), placement, safe(uuid), safe(held.unwrap_or("-"))]
    };
    if one.compute.is_empty() {
        return vec![row("-".to_owned(), &one.profile, "-", one.held_by)];
    }
    let part = |part: &ListedPart<'_>| row(part.ci.to_string(), &part.profile, part.uuid, part.held_by);
    one.compute.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32, free: u32) -> Gpu {
        let profile = Profile {
            name: "1g.18gb".into(),
            id: 19,
            slices: 1,
            instances: 7,
            free,
            sms: 16,
            memory_mib: 16384,
            placements: vec![Span { start: 0, size: 1 }, Span { start: 1, size: 1 }],
            media: Default::default(),
        };
        Gpu {
            uuid: format!("GPU-{index}"),
            index,
            name: "NVIDIA H200".into(),
            pci_device: 0,
            mode: Some(Mode { current: true, pending: true }),
            resets: false,
            profiles: vec![profile],
            instances: vec![],
            running: vec![],
            held: vec![],
        }
    }

    #[test]
    fn gpus_with_equal_rows_have_them_once() {
        let gpus = [gpu(0, 7), gpu(1, 7), gpu(2, 6), gpu(3, 7), gpu(4, 7)];
        let expected = "GPU  NAME         MIG MODE\n0-4  NVIDIA H200  on\n\n\
            GPU      PROFILE  ID  FREE/TOTAL  SMS  MEMORY     PLACEMENTS\n\
            0-1,3-4  1g.18gb  19  7/7         16   16384 MiB  {0,1}:1\n\
            2        1g.18gb  19  6/7         16   16384 MiB  {0,1}:1";
        assert_eq!(tables(&gpus.each_ref().map(ListedGpu::of), None), expected);
    }
}
