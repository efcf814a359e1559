//! The current instances as a layout file. Applying it to these GPUs changes nothing.

use std::fmt::Write as _;

use super::{Gpu, Instance, device_name};
use sublet_core::text::safe;

/// The layout file of these GPUs; those that cannot do MIG are left out.
pub fn export(gpus: &[Gpu]) -> String {
    let mut out = "# A MIG layout as `sublet mig export` found it (docs/mig.md).\n".to_owned();
    for (gpu, mode) in gpus.iter().filter_map(|gpu| Some((gpu, gpu.mode?))) {
        let _ = write!(
            out,
            "\n# {}: {}\n[[gpu]]\nmatch = \"{}\"\nmig = {}\n",
            gpu.label(),
            safe(&gpu.name),
            gpu.uuid,
            mode.current
        );
        if !gpu.instances.is_empty() {
            out.push_str("instances = [\n");
            gpu.instances.iter().for_each(|one| out.push_str(&line(gpu, one)));
            out.push_str("]\n");
        }
    }
    if gpus.iter().all(|gpu| gpu.mode.is_none()) {
        out.push_str("gpu = []\n");
    }
    out
}

fn line(gpu: &Gpu, one: &Instance) -> String {
    let Some(profile) = gpu.profile(one.profile) else {
        return format!("    # a GPU instance of unknown profile {} at {}\n", one.profile, one.span);
    };
    let mut parts: Vec<u32> = one.compute.iter().map(|part| part.slices).collect();
    parts.sort_unstable();
    let named: Vec<_> = parts.iter().map(|&slices| format!("\"{}\"", device_name(profile, slices))).collect();
    let compute =
        if parts == [profile.slices] { String::new() } else { format!(", compute = [{}]", named.join(", ")) };
    format!("    {{ profile = \"{}\", start = {}{compute} }},\n", profile.name, one.span.start)
}
