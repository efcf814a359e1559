//! Finds contradictions to a share in a container's spec.

use std::cell::OnceCell;
use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value};

use crate::config::{Config, NOT_OF_GPUS};
use crate::fs::{self, under};
use crate::inventory::Node;
use crate::text::safe;

/// Major of /dev/nvidiactl and the GPUs' nodes, fixed by the kernel (Documentation/admin-guide/devices.txt).
const NVIDIA_MAJOR: i64 = 195;

/// Majors of memory, terminals, pseudo-terminals and miscellaneous devices, fixed by the kernel (ibid.). Engines allow every
/// container some of these.
const KERNEL_MAJORS: [i64; 4] = [1, 5, 10, 136];

/// Another way out.
const ALLOW: &str = ", or set `[limits] allow_privileged = true`";

/// Something in the spec that contradicts a share. The message names it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The GPU request of Docker, `ctr` or nerdctl.
    #[error("the engine was asked for GPUs too (hook {0}); fix: remove `--gpus` (Compose: deploy.resources)")]
    GpuOption(String),
    /// A CDI device of NVIDIA's.
    #[error("the engine was asked for an NVIDIA CDI device too ({0}); fix: remove `--device` or `--gpus`")]
    Cdi(String),
    /// A device rule that allows everything.
    #[error(
        "the container may open every device of the host ({0}); fix: remove `--privileged` or the rule{ALLOW}"
    )]
    EveryDevice(String),
    /// An NVIDIA node that is not part of the share.
    #[error("the container is given {0} in addition to its share; fix: remove that device or volume{ALLOW}")]
    Node(String),
    /// A rule for nodes of NVIDIA's.
    #[error(
        "the container's device cgroup rule `{0}` opens NVIDIA devices too; fix: remove that `--device-cgroup-rule`{ALLOW}"
    )]
    Rule(String),
    /// The container has no mount namespace of its own, so mounts would appear on the host.
    #[error(
        "the container has no mount namespace of its own; fix: add one, without a path, to its config.json"
    )]
    MountNamespace,
}

/// Finds an engine's own GPU request, an allow-all device rule, or NVIDIA nodes that are not part of the share. `given`
/// are the nodes that one of sublet's CDI devices has added.
///
/// # Errors
/// The first conflict found.
pub fn conflict(spec: &Value, given: &[Node], config: &Config) -> Result<(), Conflict> {
    check_engine_request(spec)?;
    if config.limits.allow_privileged {
        return Ok(());
    }
    let (root, allowed) = (&config.driver.root, config.limits.allow_devices.as_slice());
    let given = given.to_vec();
    let mut host = Host { root, devices: OnceCell::new(), dev: under(root, "/dev"), given, allowed };
    host.given.extend(host.allowed_nodes(spec));
    // `--privileged` also adds nodes, and an engine's `--device` adds a rule. The order of the checks makes the message
    // name the user's option.
    if let Some(rule) = opening_rules(spec).find(|rule| is_every(rule)) {
        return Err(Conflict::EveryDevice(describe(rule)));
    }
    check_nodes(spec, &host)?;
    check_mounts(spec, &host)?;
    let is_of_driver =
        |rule: &&Value| number(rule, "major").is_none_or(|major| host.has(major)) && !host.gives(rule);
    opening_rules(spec).find(is_of_driver).map_or(Ok(()), |rule| Err(Conflict::Rule(describe(rule))))
}

/// How NVIDIA nodes are recognized on this host.
struct Host<'a> {
    root: &'a Path,
    /// /proc/devices, once it was asked for. If it cannot be read, it is empty: placement has already refused a host without
    /// a driver.
    devices: OnceCell<String>,
    /// Where the host's nodes are, driver root included.
    dev: PathBuf,
    /// Nodes that the container may have.
    given: Vec<Node>,
    /// `[limits] allow_devices`.
    allowed: &'a [PathBuf],
}

impl Host<'_> {
    /// Whether devices of this major are NVIDIA's.
    fn has(&self, major: i64) -> bool {
        major == NVIDIA_MAJOR || !KERNEL_MAJORS.contains(&major) && self.has_driver(major, &["nvidia"])
    }

    /// Whether /proc/devices gives `major` to a driver whose name begins with one of `names`.
    fn has_driver(&self, major: i64, names: &[&str]) -> bool {
        let devices = self.devices.get_or_init(|| fs::read_proc_devices(self.root).unwrap_or_default());
        let characters = devices.split("Block devices:").next().unwrap_or_default();
        let mut drivers = characters.lines().filter_map(|line| line.trim().split_once(' '));
        drivers.any(|(number, driver)| {
            number.parse() == Ok(major) && names.iter().any(|name| driver.trim().starts_with(name))
        })
    }

    /// Whether `entry`, a device or a rule, is for a node that is given.
    fn gives(&self, entry: &Value) -> bool {
        let numbers = (number(entry, "major"), number(entry, "minor"));
        let is = |node: &&Node| numbers == (Some(node.major.into()), Some(node.minor.into()));
        let path = entry.get("path").map(|path| path.as_str().map(Path::new));
        self.given.iter().filter(is).any(|node| path.is_none_or(|path| path == Some(&node.path)))
    }

    /// The nodes of `spec` that the administrator allows by their paths, and that are no GPU's under such a path.
    fn allowed_nodes(&self, spec: &Value) -> Vec<Node> {
        let node = |device: &Value| {
            let path = device.get("path")?.as_str().filter(|path| is_in(&plain(path), self.allowed))?;
            let number = |key| u32::try_from(number(device, key)?).ok();
            let node = Node { path: path.into(), major: number("major")?, minor: number("minor")? };
            self.has_driver(node.major.into(), &NOT_OF_GPUS).then_some(node)
        };
        entries(spec, "/linux/devices").iter().filter_map(node).collect()
    }
}

fn is_in(path: &Path, allowed: &[PathBuf]) -> bool {
    allowed.iter().any(|allowed| path.starts_with(allowed))
}

/// Docker's `--gpus` adds the legacy hook and `NVIDIA_VISIBLE_DEVICES` (moby, `daemon/nvidia_linux.go`); CDI
/// edits bring hooks and annotations (nvidia-ctk, cdi). Podman translates `--gpus` to CDI: a legacy hook
/// there comes from a hooks directory, for every container, and does nothing once we have said `void`. `ctr`
/// and nerdctl have containerd run NVIDIA's program itself as a hook (containerd, `contrib/nvidia`).
fn check_engine_request(spec: &Value) -> Result<(), Conflict> {
    for program in hook_programs(spec) {
        match program {
            "nvidia-container-runtime-hook" | "nvidia-container-toolkit"
                if asks_for_gpus(spec) && !is_of_podman(spec) =>
            {
                return Err(Conflict::GpuOption(safe(program)));
            }
            "nvidia-container-cli" => return Err(Conflict::GpuOption(safe(program))),
            "nvidia-cdi-hook" | "nvidia-ctk" => {
                return Err(Conflict::Cdi(format!("hook {}", safe(program))));
            }
            _ => {}
        }
    }
    for (key, value) in spec.get("annotations").and_then(Value::as_object).into_iter().flatten() {
        let device = value.as_str().unwrap_or_default();
        if key.starts_with("cdi.k8s.io/") && device.contains("nvidia.com/") {
            return Err(Conflict::Cdi(safe(device)));
        }
    }
    Ok(())
}

/// Whether Podman made the spec (libpod, `pkg/annotations`).
pub(super) fn is_of_podman(spec: &Value) -> bool {
    let annotations = spec.get("annotations");
    annotations.and_then(|annotations| text(annotations, "io.container.manager")) == Some("libpod")
}

/// File names of all hooks of all stages, and of the program that containerd's `oci-hook` runs.
fn hook_programs(spec: &Value) -> impl Iterator<Item = &str> {
    let stages = spec.get("hooks").and_then(Value::as_object);
    stages.into_iter().flatten().filter_map(|(_, hooks)| hooks.as_array()).flatten().flat_map(|hook| {
        let args = entries(hook, "/args").iter().filter_map(Value::as_str);
        let ran = args.skip_while(|arg| *arg != "oci-hook").find(|arg| arg.starts_with('/'));
        let programs = text(hook, "path").into_iter().chain(ran);
        programs.filter_map(|program| Path::new(program).file_name()?.to_str())
    })
}

/// The values for which the legacy hook does nothing (nvidia-container-toolkit, `image/cuda_image.go`).
fn asks_for_gpus(spec: &Value) -> bool {
    let value = environment_value(spec, "NVIDIA_VISIBLE_DEVICES");
    !matches!(value.as_deref(), None | Some("" | "void"))
}

/// The elements of the array at `pointer`; none if there is no array.
pub(crate) fn entries<'a>(spec: &'a Value, pointer: &str) -> &'a [Value] {
    spec.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The text of the field `key`, if it is one.
pub(crate) fn text<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object.get(key)?.as_str()
}

/// The member `key`, which is `empty` if it was absent. `null`, which is Go's nil, counts as absent.
pub(super) fn member<'a>(object: &'a mut Map<String, Value>, key: &str, empty: Value) -> &'a mut Value {
    let member = object.entry(key).or_insert(Value::Null);
    if member.is_null() {
        *member = empty;
    }
    member
}

/// A device number of a rule; -1 and none at all are wildcards.
fn number(rule: &Value, key: &str) -> Option<i64> {
    rule.get(key).and_then(Value::as_i64).filter(|&number| number >= 0)
}

fn opens(rule: &Value) -> bool {
    // If `access` is absent, it means all access (in runc and crun).
    let access = text(rule, "access").filter(|access| !access.is_empty());
    access.is_none_or(|access| access.contains(['r', 'w']))
}

fn is_of_every_kind(rule: &Value) -> bool {
    matches!(text(rule, "type"), None | Some("" | "a"))
}

fn is_allowed(rule: &Value) -> bool {
    rule.get("allow").and_then(Value::as_bool) == Some(true)
}

/// `{"allow": false, "access": "rwm"}`: it cancels all rules before it.
fn denies_all(rule: &Value) -> bool {
    !is_allowed(rule) && is_of_every_kind(rule) && is_every(rule) && opens(rule)
}

/// Rules that let character devices be opened, after the last one that denies all.
fn opening_rules(spec: &Value) -> impl Iterator<Item = &Value> {
    let all = entries(spec, "/linux/resources/devices");
    let in_force = all.iter().rposition(denies_all).map_or(all, |last| &all[last + 1..]);
    in_force
        .iter()
        .filter(|rule| is_allowed(rule) && (is_of_every_kind(rule) || rule["type"] == "c") && opens(rule))
}

fn is_every(rule: &Value) -> bool {
    number(rule, "major").is_none() && number(rule, "minor").is_none()
}

/// Whether `rules` decide about devices that none of them names. If they do not, crun 1.8 to 1.21 installs no filter at
/// all, and every node that the container creates can be opened.
pub(super) fn has_default_rule(rules: &[Value]) -> bool {
    rules.iter().any(|rule| denies_all(rule) || is_allowed(rule) && is_of_every_kind(rule) && is_every(rule))
}

/// Refuses a spec without a mount namespace of its own: the container's mounts would be made on
/// the host, and stay there.
///
/// # Errors
/// `linux.namespaces` has no new one.
pub(crate) fn check_mount_namespace(spec: &Value) -> Result<(), Conflict> {
    let is_new = |entry: &Value| {
        text(entry, "type") == Some("mount")
            && matches!(entry.get("path").map(Value::as_str), None | Some(Some("")))
    };
    if entries(spec, "/linux/namespaces").iter().any(is_new) { Ok(()) } else { Err(Conflict::MountNamespace) }
}

/// As `--device-cgroup-rule` is written.
fn describe(rule: &Value) -> String {
    let part = |key| number(rule, key).map_or_else(|| "*".to_owned(), |number| number.to_string());
    let word = |key, absent| text(rule, key).filter(|word| !word.is_empty()).unwrap_or(absent);
    let (kind, access) = (word("type", "a"), word("access", "rwm"));
    safe(&format!("{kind} {}:{} {access}", part("major"), part("minor")))
}

fn check_nodes(spec: &Value, host: &Host<'_>) -> Result<(), Conflict> {
    for device in entries(spec, "/linux/devices").iter().filter(|device| !host.gives(device)) {
        let path = text(device, "path").unwrap_or_default();
        let by_number = matches!(text(device, "type"), Some("c" | "u"))
            && device.get("major").and_then(Value::as_i64).is_some_and(|major| host.has(major));
        if by_number || is_nvidia_node(&plain(path), Path::new("/dev")) {
            return Err(Conflict::Node(format!("the device {}", safe(path))));
        }
    }
    Ok(())
}

fn check_mounts(spec: &Value, host: &Host<'_>) -> Result<(), Conflict> {
    for mount in entries(spec, "/mounts") {
        let path = |key| text(mount, key).unwrap_or_default();
        let dev = [Path::new("/dev"), &host.dev];
        let brings_nodes = |path: &&str| {
            let plain = plain(path);
            let is_node = dev.iter().any(|dev| plain == **dev || is_nvidia_node(&plain, dev));
            is_node && !is_in(&plain, host.allowed)
        };
        if is_bind(mount) {
            if let Some(path) = [path("source"), path("destination")].iter().find(|path| brings_nodes(path)) {
                return Err(Conflict::Node(format!("the bind mount of {}", safe(path))));
            }
        } else if is_nvidia_node(&plain(path("destination")), Path::new("/dev")) {
            // Docker's `--tmpfs` is `nodev`, so nodes created in it cannot be opened.
            return Err(Conflict::Node(format!("a mount over {}", safe(path("destination")))));
        }
    }
    Ok(())
}

/// Whether the runtime bind-mounts it (OCI runtime specification, config.md, "Mounts").
pub(super) fn is_bind(mount: &Value) -> bool {
    let is_option = |option: &Value| matches!(option.as_str(), Some("bind" | "rbind"));
    text(mount, "type") == Some("bind") || entries(mount, "/options").iter().any(is_option)
}

/// `/dev/nvidia0`, `/dev/nvidiactl`, `/dev/nvidia-caps/…`.
fn is_nvidia_node(path: &Path, dev: &Path) -> bool {
    let below = path.strip_prefix(dev).ok().and_then(|below| below.components().next());
    below.is_some_and(|first| first.as_os_str().to_string_lossy().starts_with("nvidia"))
}

/// `path` as an absolute one without `.`, `..` and doubled slashes, as text: no link is looked at.
pub(super) fn plain(path: &str) -> PathBuf {
    let mut out = PathBuf::from("/");
    for component in Path::new(path).components() {
        match component {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => {
                out.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    out
}

/// The value of `name` in `process.env`, the last one if it stands several times.
pub(crate) fn environment_value(spec: &Value, name: &str) -> Option<String> {
    let value = |entry: &Value| {
        let (key, value) = entry.as_str()?.split_once('=')?;
        (key == name).then(|| value.to_owned())
    };
    entries(spec, "/process/env").iter().rev().find_map(value)
}
