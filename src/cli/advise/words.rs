//! The advice in words.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::{Advice, Found, Question, Trust};
use crate::bench::{Mode, Sharing};
use crate::mig::Foreseen;
use crate::shown::memory;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::place::Placement;
use sublet_core::text::safe;

/// The advice in one sentence.
pub fn sentence(advice: &Advice, question: &Question, gpu: &Device) -> String {
    let (mode, tenants) = (&advice.candidate.mode, question.tenants);
    let gpu = format!("{} ({})", gpu.label(), safe(&gpu.name));
    match mode.sharing {
        Sharing::Exclusive if tenants == 1 && question.named => format!("Give the tenant {gpu} alone."),
        Sharing::Exclusive if tenants == 1 => "Give the tenant a GPU alone.".to_owned(),
        Sharing::Exclusive => format!("Give each of {tenants} tenants a GPU alone."),
        Sharing::Mig => {
            let of = mode.profile.as_ref().map(|profile| format!(": {}", safe(profile))).unwrap_or_default();
            format!("Give {} a MIG device each, of {gpu}{of}.", people(tenants))
        }
        _ => format!("Share {gpu} among {} by {}.", people(tenants), by(mode, tenants)),
    }
}

fn people(tenants: u32) -> String {
    if tenants == 1 { "1 tenant".to_owned() } else { format!("{tenants} tenants") }
}

fn by(mode: &Mode, tenants: u32) -> String {
    let name = match mode.sharing {
        Sharing::Mps => "MPS, on one server that they share",
        Sharing::Dedicated => "turns, each on an MPS server of its own",
        _ => "turns (time-slice)",
    };
    let limit = mode.sm.map(|sm| format!(", each with at most {} % of the SMs", sm.percent(tenants)));
    format!("{name}{}", limit.unwrap_or_default())
}

/// What each tenant gets, a line for each different size.
pub fn each_gets(advice: &Advice, inventory: &Inventory) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let there = advice.placements.iter().map(|placement| gets(placement, advice, inventory));
    let made = advice.made.iter().map(|(instance, _)| {
        let (name, Foreseen { sms, memory_bytes, .. }) = (safe(instance.name()), instance);
        format!("a {name}, which is created when it starts: {sms} SMs, {} of memory", memory(*memory_bytes))
    });
    for line in there.chain(made) {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

fn gets(placement: &Placement, advice: &Advice, inventory: &Inventory) -> String {
    let device = placement.devices.first().and_then(|uuid| inventory.device(uuid));
    let Some(device) = device else { return String::new() };
    let sms = sms(placement, device);
    let turns = match advice.candidate.mode.sharing {
        Sharing::TimeSlice | Sharing::Dedicated => " while its turn lasts",
        _ => "",
    };
    let limit = match (placement.memory_bytes, advice.candidate.mode.sharing) {
        (Some(bytes), _) => format!("{} of memory", memory(bytes)),
        (None, Sharing::Exclusive | Sharing::Mig) => {
            format!("all its {} of memory", memory(device.memory_bytes))
        }
        (None, _) => "no limit on memory".to_owned(),
    };
    let part = if device.is_mig() { format!("a {}, ", safe(device.kind())) } else { String::new() };
    format!("{part}{sms}{turns}, {limit}")
}

fn sms(placement: &Placement, device: &Device) -> String {
    let all = device.sm_count.map(u64::from);
    let own = placement.sm.map_or(all, |sm| device.sms_at(sm));
    match (own, all) {
        (Some(own), Some(all)) if own < all => format!("{own} of {all} SMs"),
        (_, Some(all)) => format!("all {all} SMs"),
        _ => "its SMs".to_owned(),
    }
}

/// What sharing costs, as it was measured.
pub fn what_it_cost(found: &Found, tenants: u32) -> String {
    let together = if found.n == 1 { "alone".to_owned() } else { format!("with {} at once", found.n) };
    let other = if found.n == tenants {
        String::new()
    } else {
        format!(" ({tenants} were not measured; fewer wait less)")
    };
    let at = |mean: f64, p99: Option<f64>| {
        let p99 = p99.map(|p99| format!(", p99 {p99:.1} ms")).unwrap_or_default();
        format!("mean {mean:.1} ms{p99}")
    };
    let ratio = found.alone.map(|(mean, _)| found.mean_ms / mean);
    if !found.same_gpu {
        let ratio = ratio.map_or_else(
            || "an iteration alone was not measured".to_owned(),
            |ratio| format!("an iteration took {ratio:.1} times as long as alone"),
        );
        return format!("{together}{other}, {ratio}, on another GPU ({})", safe(&found.gpu));
    }
    let alone = found.alone.filter(|_| found.n > 1).map_or_else(String::new, |(mean, p99)| {
        format!("; alone {}: {:.1} times as long", at(mean, p99), found.mean_ms / mean)
    });
    format!(
        "{} {together}{other}{alone}; {:.1} iterations a second together",
        at(found.mean_ms, found.p99_ms),
        found.per_second
    )
}

/// What sharing costs by the rules: nothing that depends on the load.
pub fn concluded(advice: &Advice, question: &Question, gpu: &Device, inventory: &Inventory) -> String {
    let tenants = question.tenants;
    let Advice { candidate, placements, made } = advice;
    match candidate.mode.sharing {
        Sharing::Exclusive => "nothing: it is alone".to_owned(),
        Sharing::TimeSlice | Sharing::Dedicated => format!(
            "turns: while all {tenants} are busy, each has 1/{tenants} of the time, so an iteration takes about \
             {tenants} times as long as alone; while the others idle, as long as alone"
        ),
        Sharing::Mps if candidate.mode.sm.is_some() => format!(
            "each computes with at most 1/{tenants} of the SMs, also while the others idle; kernels that need fewer \
             lose least"
        ),
        Sharing::Mps => {
            "kernels run at the same time: nothing while they leave SMs free, up to turns where one \
                         kernel fills the GPU"
                .to_owned()
        }
        Sharing::Mig => {
            let devices = placements.iter().flat_map(|one| &one.devices);
            let devices = devices.filter_map(|uuid| inventory.device(uuid)?.sm_count);
            let least = devices.chain(made.iter().map(|(instance, _)| instance.sms)).min();
            least.zip(gpu.sm_count).map_or_else(
                || "the instance's SMs instead of the GPU's".to_owned(),
                |(least, all)| {
                    format!("{least} of the GPU's {all} SMs, also while the others idle; no waiting for them")
                },
            )
        }
    }
}

/// The command that measures what `question` asks; `None`: whole GPUs cost nothing.
pub fn measure_with(question: &Question, gpu: &Device) -> Option<String> {
    let (modes, tenants) = match (question.trust, gpu.mig_enabled) {
        (_, true) => ("mig", question.tenants),
        // Only a time has to be measured then, and that of one container.
        (Trust::Not, _) => (question.p99_ms.map(|_| "exclusive")?, 1),
        (Trust::Partly, _) => ("exclusive,time-slice,dedicated", question.tenants),
        (Trust::Fully, _) => ("exclusive,time-slice,dedicated,mps,mps:equal", question.tenants),
    };
    let numbers = if tenants == 1 { "1".to_owned() } else { format!("1,{tenants}") };
    let on = gpu.number();
    let on = if on == "0" { String::new() } else { format!(" --gpu {on}") };
    Some(format!("sublet bench run -n {numbers} --mode {modes}{on}"))
}

/// Texts that give a share to a container. `IMAGE` stands for the tenant's own.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Paste {
    /// A command, for one tenant.
    pub docker_run: String,
    /// A Compose file with all tenants.
    pub compose: String,
    /// A `.container` file, for one tenant.
    pub quadlet: String,
}

impl Paste {
    /// The texts for so many tenants with these annotations.
    pub fn new(annotations: &BTreeMap<String, String>, tenants: u32) -> Self {
        let option = |(key, value): (&String, &String)| format!("--annotation {key}={value} ");
        let options: String = annotations.iter().map(option).collect();
        Self {
            docker_run: format!("docker run --runtime sublet {options}IMAGE\n"),
            compose: compose(annotations, tenants),
            quadlet: quadlet(annotations, options.trim_end()),
        }
    }
}

fn compose(annotations: &BTreeMap<String, String>, tenants: u32) -> String {
    let lines = annotations.iter().map(|(key, value)| format!("      {key}: \"{value}\"\n"));
    let scale = if tenants == 1 { String::new() } else { format!("    scale: {tenants}\n") };
    format!(
        "services:\n  tenant:\n    image: IMAGE\n    runtime: sublet\n{scale}    annotations:\n{}",
        lines.collect::<String>()
    )
}

fn quadlet(annotations: &BTreeMap<String, String>, options: &str) -> String {
    // systemd reads % as the beginning of a specifier.
    let plain = |text: &str| text.replace('%', "%%");
    let lines = annotations.iter().map(|(key, value)| format!("Annotation={key}={}\n", plain(value)));
    format!(
        "[Unit]\nStartLimitIntervalSec=0\n\n[Container]\nImage=IMAGE\n{}\n[Service]\n\
         ExecStartPre=/usr/bin/sublet wait {}\nRestart=always\nRestartSec=5\n",
        lines.collect::<String>(),
        plain(options)
    )
}
