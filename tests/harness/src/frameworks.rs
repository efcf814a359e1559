//! How frameworks read a container's environment, by their own source code (docs/recipes.md, "What the frameworks
//! read"): combinations of names that they refuse, and values that they cannot read.

/// What a framework would refuse in `env` (`NAME=value`), one line each.
#[must_use]
pub fn refusals(env: &[String]) -> Vec<String> {
    let of = |name: &str| {
        let mut entries = env.iter().rev().filter_map(|entry| entry.split_once('='));
        entries.find(|(found, _)| *found == name).map_or("", |(_, value)| value)
    };
    [jax(&of), ordinals(&of), mps(&of), triton(&of), twice(env)].into_iter().flatten().collect()
}

/// `generate_pjrt_gpu_plugin_options` in `jaxlib/xla_client.py`: having both names is a `ValueError` since 0.4.33, and
/// the value is converted by `float`. Earlier versions read only the older name.
fn jax<'a>(of: &impl Fn(&str) -> &'a str) -> Option<String> {
    let (new, old) = (of("XLA_CLIENT_MEM_FRACTION"), of("XLA_PYTHON_CLIENT_MEM_FRACTION"));
    if !new.is_empty() && !old.is_empty() {
        return Some("JAX: XLA_CLIENT_MEM_FRACTION beside XLA_PYTHON_CLIENT_MEM_FRACTION".to_owned());
    }
    let is_fraction = |text: &&str| text.parse::<f64>().is_ok_and(|value| value > 0.0 && value <= 1.0);
    let bad = [new, old].into_iter().filter(|text| !text.is_empty()).find(|text| !is_fraction(text));
    bad.map(|text| format!("JAX: {text} is no fraction"))
}

/// vLLM calls `int()` on each entry of `CUDA_VISIBLE_DEVICES`, unless it names a MIG device.
fn ordinals<'a>(of: &impl Fn(&str) -> &'a str) -> Option<String> {
    let visible = of("CUDA_VISIBLE_DEVICES");
    let bad = visible.split(',').find(|text| !text.starts_with("MIG-") && text.parse::<u32>().is_err());
    bad.filter(|_| !visible.is_empty() && !visible.starts_with("GPU-"))
        .map(|text| format!("vLLM: int({text:?})"))
}

/// If the driver cannot use one entry, it drops all limits (docs/evidence, 2026-11-21-h200-mps.md).
fn mps<'a>(of: &impl Fn(&str) -> &'a str) -> Option<String> {
    let limit = of("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    let is_one = |text: &str| {
        let digits = text.strip_prefix("0=").and_then(|rest| rest.strip_suffix('M')).unwrap_or_default();
        digits.parse::<u64>().is_ok_and(|mib| mib > 0)
    };
    (!limit.is_empty() && !is_one(limit)).then(|| format!("MPS: {limit} drops every limit"))
}

/// `libcuda_dirs` in triton/backends/nvidia/driver.py uses the value as a single directory for `-L`.
fn triton<'a>(of: &impl Fn(&str) -> &'a str) -> Option<String> {
    let dir = of("TRITON_LIBCUDA_PATH");
    let is_one = dir.starts_with('/') && !dir.contains(':');
    (!dir.is_empty() && !is_one).then(|| format!("Triton: {dir} is no directory"))
}

/// If a name occurs twice, programs differ in which entry they use.
fn twice(env: &[String]) -> Option<String> {
    let name = |entry: &String| entry.split('=').next().unwrap_or_default().to_owned();
    let is_again = |at: usize| env[..at].iter().any(|entry| name(entry) == name(&env[at]));
    (0..env.len()).find(|at| is_again(*at)).map(|at| format!("{} stands twice", name(&env[at])))
}
