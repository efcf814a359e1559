//! Refuses values that serde's types accept but that make no sense.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use crate::config::{Config, DeviceRule, NOT_OF_GPUS, PolicyRule, Runtime, is_own_name};
use crate::request;
use crate::share::Action;
use crate::share::LONGEST_WAIT;
use crate::share::Selector;
use crate::text::safe;

/// The longest path to which a Unix socket can be bound (unix(7): 108 bytes with the NUL), minus the longest path below
/// the state directory: `/mps/GPU-<uuid>/pipe/control_privileged`.
const LONGEST_STATE_DIR: usize = 107 - "/mps/".len() - 40 - "/pipe/control_privileged".len();

/// A larger factor would limit nothing.
const LARGEST_OVERCOMMIT: f64 = 100.0;

/// A value out of its range: its place and the fault.
#[derive(Debug)]
pub(super) struct Problem {
    /// Keys from the top of the file. Elements of arrays are given by number.
    pub(super) key: Vec<String>,
    pub(super) message: String,
}

type Checked = Result<(), Problem>;

/// The first problem of `config`.
pub(super) fn check(config: &Config) -> Checked {
    state_dir(&config.state_dir)?;
    runtime(&config.runtime)?;
    absolute(&["driver", "root"], &config.driver.root)?;
    config.driver.search.iter().try_for_each(|path| absolute(&["driver", "search"], Path::new(path)))?;
    require(config.defaults.wait <= LONGEST_WAIT, &["defaults", "wait"], "must be at most 60s")?;
    for (index, rule) in config.device.iter().enumerate() {
        device(index, rule)?;
    }
    overcommit("sm_overcommit", config.limits.sm_overcommit)?;
    overcommit("memory_overcommit", config.limits.memory_overcommit)?;
    require(config.limits.time_slice_max >= 1, &["limits", "time_slice_max"], "must be 1 or more")?;
    for path in &config.limits.allow_devices {
        let first = path.strip_prefix("/dev").ok().and_then(|below| below.iter().next()?.to_str());
        let fits = first.is_some_and(|first| NOT_OF_GPUS.iter().any(|name| first.starts_with(name)));
        let help = "may have /dev/nvidia-fs<N> and /dev/nvidia-caps-imex-channels, no GPU's node";
        require(fits, &["limits", "allow_devices"], help)?;
    }
    require(config.mps.start_timeout > Duration::ZERO, &["mps", "start_timeout"], "must be over 0")?;
    for name in config.grant.env.keys() {
        let fits = !name.is_empty() && !name.contains(|c: char| c == '=' || c.is_control());
        require(fits, &["grant", "env", name], "is not a valid name of an environment variable")?;
        let help = "is set by sublet itself: see [grant] visible_devices, nvidia_visible_devices and tell_neighbours";
        require(!is_own_name(name), &["grant", "env", name], help)?;
    }
    absolute(&["cdi", "spec"], &config.cdi.spec)?;
    let is_json = config.cdi.spec.extension().is_some_and(|extension| extension == "json");
    require(is_json, &["cdi", "spec"], "must end in .json: engines read no other files")?;
    for (index, rule) in config.policy.iter().enumerate() {
        policy(index, rule)?;
    }
    let period = config.guard.period;
    let fits = (Duration::from_millis(100)..=Duration::from_secs(10)).contains(&period);
    require(fits, &["guard", "period"], "must be from 100ms to 10s")?;
    let has_one = config.guard.strangers != Action::Container;
    require(
        has_one,
        &["guard", "strangers"],
        "must be \"report\" or \"terminate\": strangers have no container",
    )?;
    config.mig.layout.as_deref().map_or(Ok(()), |layout| absolute(&["mig", "layout"], layout))?;
    config.share.keys().try_for_each(|name| share(name, config))
}

/// Checks only `[runtime]`.
pub(super) fn runtime(runtime: &Runtime) -> Checked {
    let names = !runtime.low_level.is_empty() && runtime.low_level.iter().all(|name| !name.is_empty());
    require(
        names,
        &["runtime", "low_level"],
        "must name one low-level runtime or more, such as [\"runc\", \"crun\"]",
    )?;
    runtime.log.as_deref().map_or(Ok(()), |log| absolute(&["runtime", "log"], log))
}

fn require(holds: bool, key: &[&str], message: &str) -> Checked {
    if holds { Ok(()) } else { Err(problem(key, message)) }
}

fn problem(key: &[&str], message: &str) -> Problem {
    let name: Vec<_> = key.iter().map(|part| safe(part)).collect();
    let message = format!("{} {message}", name.join("."));
    Problem { key: key.iter().map(|part| (*part).to_owned()).collect(), message }
}

fn absolute(key: &[&str], path: &Path) -> Checked {
    require(path.is_absolute(), key, "must be an absolute path")
}

fn state_dir(path: &Path) -> Checked {
    absolute(&["state_dir"], path)?;
    require(
        path.as_os_str().as_bytes().len() <= LONGEST_STATE_DIR,
        &["state_dir"],
        &format!(
            "must be at most {LONGEST_STATE_DIR} bytes long, because paths of MPS sockets below it may have 107"
        ),
    )
}

fn overcommit(key: &str, value: f64) -> Checked {
    require(value > 0.0 && value <= LARGEST_OVERCOMMIT, &["limits", key], "must be over 0 and at most 100")
}

fn device(index: usize, rule: &DeviceRule) -> Checked {
    let index = index.to_string();
    // An alias must not be defined by an alias.
    let matches = rule.matches == "all"
        || Selector::parse(&rule.matches).is_some_and(|selector| !matches!(selector, Selector::Name(_)));
    require(
        matches,
        &["device", &index, "match"],
        "must be all, an index, GPU-<uuid>, PCI bus id, MIG-<uuid>, \"G:M\" or model:<glob>",
    )?;
    let alias = |name: &str| Selector::parse(&format!("name:{name}")).is_some() && !name.contains([',', ' ']);
    require(
        rule.name.as_deref().is_none_or(alias),
        &["device", &index, "name"],
        "must be a word without commas and spaces, at most 128 bytes long",
    )
}

fn policy(index: usize, rule: &PolicyRule) -> Checked {
    let index = index.to_string();
    let name = |name: &Option<String>| name.as_deref().is_none_or(|name| !name.is_empty());
    require(
        rule.user.is_some() != rule.group.is_some() && name(&rule.user) && name(&rule.group),
        &["policy", &index],
        "must name either a user (\"*\" for all) or a group",
    )?;
    require(
        rule.modes.as_ref().is_none_or(|modes| !modes.is_empty()),
        &["policy", &index, "modes"],
        "is empty",
    )?;
    let devices = rule.devices.iter().flatten();
    let known = devices.clone().all(|text| &**text == "all" || Selector::parse(text).is_some());
    require(
        known && rule.devices.as_ref().is_none_or(|devices| !devices.is_empty()),
        &["policy", &index, "devices"],
        "must be a list of selectors as in sublet.gpu: indices, GPU-<uuid>, PCI bus ids, name:<alias>, model:<glob>",
    )
}

/// A named share must be a valid request by itself. The container may add what `[limits] require` demands.
fn share(name: &str, config: &Config) -> Checked {
    let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let fits = name.chars().all(word) && name.starts_with(|c: char| c.is_ascii_alphanumeric());
    require(fits, &["share", name], "must be named with letters, digits, '-', '_' and '.'")?;
    let lenient = Config {
        share: config.share.get(name).map(|keys| (name.to_owned(), keys.clone())).into_iter().collect(),
        defaults: config.defaults.clone(),
        mig: config.mig.clone(),
        ..Config::default()
    };
    request::parse(&BTreeMap::new(), Some(name), None, &lenient).map(drop).map_err(|error| {
        let key = error.setting().map(request::Setting::key).unwrap_or_default();
        Problem { key: vec!["share".into(), name.into(), key.into()], message: error.to_string() }
    })
}
