//! Everything that one container is given: [`Placement`] in, [`Grant`] out. Pure.
//!
//! The environment has the variables that CUDA, MPS and programs that choose their own size read.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

use crate::config::{Config, Inject, OWN_PREFIXES, VisibleDevices};
use crate::inventory::{self, Device, Inventory, Node, context_bytes};
use crate::ledger::{Lease, VolumeFiles};
use crate::place::Placement;
use crate::share::{Capabilities, Capability, MIB, MigCapability, Percent, Priority};
use crate::text::safe_path;

/// Everything that is to be applied to one container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Grant {
    /// The lease, for the `sublet.lease` annotation.
    pub lease: String,
    /// The lease itself as compact JSON, for `sublet.lease.record`. A lost ledger is rebuilt from it.
    pub record: String,
    /// The configuration file that criu reads before it saves the container (`inventory::no_checkpoint`).
    pub no_checkpoint: PathBuf,
    /// Device nodes, each with a cgroup rule `rw`.
    pub nodes: Vec<GrantedNode>,
    /// Read-only bind mounts.
    pub mounts: Vec<Mount>,
    /// The process's environment.
    pub env: Environment,
    /// Paths hidden from the container.
    pub masked_paths: Vec<PathBuf>,
    /// Warnings for the user, one line each.
    pub warnings: Vec<String>,
}

/// A node and its path on the host (driver root included). A container in a user namespace needs the real node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantedNode {
    /// As the container sees it.
    pub node: Node,
    /// On the host.
    pub source: PathBuf,
}

/// What a container sees of one GPU.
#[derive(Clone, Debug)]
pub struct GpuNodes {
    /// Its node.
    pub nodes: Vec<GrantedNode>,
    /// Its nodes for graphics, which a container has if it has those of any of its GPUs.
    pub for_graphics: Vec<GrantedNode>,
    /// Its directory below /proc, which is hidden in containers without it.
    pub directory: PathBuf,
    /// Whether the container is to have it.
    pub is_given: bool,
}

/// A bind mount: read-only, nosuid, nodev, rprivate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// On the host.
    pub source: PathBuf,
    /// In the container, absolute.
    pub destination: PathBuf,
}

/// Changes to an environment; the same for config.json and for exec's process file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// Set, whatever was there before. Afterwards each name is there once.
    pub set: Vec<(String, String)>,
    /// Set only if the name is absent, and also the name that frameworks refuse together with it ([`refused_beside`]).
    pub default: Vec<(String, String)>,
    /// Variables with these prefixes are removed unless they are in `set`.
    pub remove_prefixes: Vec<String>,
}

/// The container's image, as `oci::image` examined it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with one another")]
pub struct Image {
    /// The directory inside the rootfs with a libc that the driver's libraries can use; `None`: musl, or static
    /// programs.
    pub library_dir: Option<PathBuf>,
    /// A Nix image: libraries go to /run/opengl-driver/lib.
    pub nix: bool,
    /// The container's /tmp is the host's own.
    pub tmp_is_host: bool,
    /// Its share has `default_directory = false`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_default: bool,
    /// The container's /tmp is a volume in which CUDA's default directory cannot be made: read-only, or shared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tmp_is_closed: bool,
    /// The directory of a volume in which CUDA's default directory is mounted, and made if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tmp_volume: Option<VolumeFiles>,
    /// A volume brings another MPS daemon's directory to CUDA's default place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub other_daemon: bool,
    /// Mount points for files that are missing in the rootfs. The runtime creates empty files there.
    pub created: Vec<PathBuf>,
    /// Mount points that are empty files already, the image's own or by the ledger another container's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub empty: Vec<PathBuf>,
    /// Files that are not mounted, because a link of the image leads their mounts to another file of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<PathBuf>,
    /// Files that are not mounted, because the image lacks their needs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub useless: Vec<PathBuf>,
    /// Directories of volumes in which sublet's files are mounted, with the files that are created there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeFiles>,
    /// The program `sublet-share` on the host, if it is there and the container has a place for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_program: Option<PathBuf>,
    /// One line each: libraries of the image that take precedence over the mounted ones.
    pub warnings: Vec<String>,
}

/// Where the container sees its MPS directory.
pub const MPS_DIR: &str = "/run/sublet/mps";
/// CUDA's default for it. Processes without the share's environment look here.
pub const MPS_DEFAULT_DIR: &str = "/tmp/nvidia-mps";
/// Where the container sees the program that prints its share.
pub(crate) const SHARE_PROGRAM: &str = "/usr/bin/sublet-share";

impl Image {
    /// Where the driver's libraries go, if there is such a place.
    pub fn libraries(&self) -> Option<&Path> {
        if self.nix { Some(Path::new("/run/opengl-driver/lib")) } else { self.library_dir.as_deref() }
    }

    /// Whether the MPS directory is also mounted at [`MPS_DEFAULT_DIR`].
    pub(crate) const fn takes_default_directory(&self) -> bool {
        !self.tmp_is_host && !self.tmp_is_closed && !self.without_default
    }

    /// Everything that its user should know of it, one line each.
    pub fn warnings(&self) -> Vec<String> {
        let line = |paths: &[PathBuf], why: &str| {
            let listed: Vec<_> = paths.iter().map(|path| safe_path(path)).collect();
            (!listed.is_empty()).then(|| format!("left out, because {why}: {}", listed.join(" ")))
        };
        let left_out = [
            line(
                &self.left_out,
                "the image has a link to another file there, which would be covered (remove the link from the image if \
                 the driver's file is needed)",
            ),
            line(
                &self.useless,
                "the image lacks the loader or library of the host's that they name, as on NixOS",
            ),
        ];
        self.warnings.iter().cloned().chain(left_out.into_iter().flatten()).collect()
    }
}

/// Everything that the container with this placement gets.
pub fn grant(
    placement: &Placement,
    lease: &Lease,
    capabilities: &Capabilities,
    image: &Image,
    inventory: &Inventory,
    config: &Config,
) -> Grant {
    let devices = list_devices(&lease.devices, inventory);
    let libraries = image.libraries().filter(|_| config.driver.inject == Inject::Builtin);
    let files = libraries
        .into_iter()
        .flat_map(|dir| inventory.mounted_files(dir, capabilities, config.driver.inject))
        .filter(|(_, destination)| {
            !image.left_out.contains(destination) && !image.useless.contains(destination)
        });
    let mut mounts: Vec<Mount> =
        files.map(|(file, destination)| Mount { source: file.source.clone(), destination }).collect();
    let program =
        |source: &PathBuf| Mount { source: source.clone(), destination: PathBuf::from(SHARE_PROGRAM) };
    mounts.extend(image.share_program.as_ref().map(program));
    // Mounted last: through a link in the image it may cover other mount points, and crun would create those inside it,
    // on the host.
    mounts.extend(mps_mounts(lease, image, config));
    Grant {
        lease: lease.id.to_string(),
        record: lease.to_annotation(&config.state_dir),
        no_checkpoint: inventory::no_checkpoint(&config.state_dir),
        nodes: list_nodes(&devices, capabilities, &placement.mig_caps, inventory, config),
        mounts,
        env: list_environment(lease, placement.neighbours, libraries, inventory, config),
        masked_paths: masked_paths(&devices, inventory),
        warnings: warnings(placement, image, inventory, config),
    }
}

/// Every node that a container with `uuid` may get, whatever its driver capabilities.
pub(crate) fn nodes_of(uuid: &str, inventory: &Inventory, config: &Config) -> Vec<Node> {
    let devices = list_devices(&[uuid.to_owned()], inventory);
    let all = Capabilities(Capability::VARIANTS.to_vec());
    list_nodes(&devices, &all, &[], inventory, config).into_iter().map(|granted| granted.node).collect()
}

/// Mounts the public directory of its server twice. Processes started by exec may lack the share's environment; at
/// CUDA's default path they still find the server. Nothing is mounted in the host's own /tmp.
fn mps_mounts(lease: &Lease, image: &Image, config: &Config) -> Vec<Mount> {
    let Some(daemon) = &lease.daemon else { return Vec::new() };
    let source = daemon.public(&config.state_dir);
    let at = |destination: &str| Mount { source: source.clone(), destination: PathBuf::from(destination) };
    let mut mounts = vec![at(MPS_DIR)];
    if image.takes_default_directory() {
        mounts.push(at(MPS_DEFAULT_DIR));
    }
    mounts
}

/// The directories in /proc of GPUs that the container does not have.
fn masked_paths(devices: &[&Device], inventory: &Inventory) -> Vec<PathBuf> {
    let other_gpus = inventory.gpus().filter(|other| devices.iter().all(|own| own.gpu() != other.uuid));
    other_gpus.map(directory_in_proc).collect()
}

fn directory_in_proc(gpu: &Device) -> PathBuf {
    Path::new("/proc/driver/nvidia/gpus").join(&gpu.bus_id)
}

/// What a container sees of `gpu`, which it is given or not.
pub fn gpu_nodes(gpu: &Device, is_given: bool, config: &Config) -> GpuNodes {
    let granted = |nodes: &[Node]| nodes.iter().map(|node| granted(node.clone(), config)).collect();
    let (nodes, for_graphics) = (granted(&gpu.nodes), granted(&gpu.dri_nodes));
    GpuNodes { nodes, for_graphics, directory: directory_in_proc(gpu), is_given }
}

fn warnings(placement: &Placement, image: &Image, inventory: &Inventory, config: &Config) -> Vec<String> {
    let mut warnings = placement.warnings.clone();
    warnings.extend(image.warnings());
    if config.driver.inject == Inject::Builtin && image.libraries().is_none() {
        warnings.push(
            "the image has no glibc for the driver's libraries (it uses musl, or is static), so it gets \
             the device nodes and the environment, but no driver libraries; use a glibc image for CUDA"
                .to_owned(),
        );
    }
    if !image.takes_default_directory() && placement.daemon.is_some() {
        let why = match (image.without_default, image.tmp_is_host) {
            (true, _) => "its share has default_directory = false",
            (false, true) => "the container's /tmp is the host's",
            (false, false) => "the container's /tmp is a read-only volume, or one shared with the host",
        };
        warnings.push(format!(
            "{why}, so its MPS directory is not at /tmp/nvidia-mps: processes without the container's environment run \
             outside its share"
        ));
    }
    if inventory.driver.majors.uvm.is_none() {
        warnings.push(
            "kernel module nvidia-uvm is not loaded, so CUDA will not start: run `nvidia-modprobe -u -c \
             0`, then `sublet refresh`"
                .to_owned(),
        );
    }
    warnings
}

#[cfg(test)]
mod nodes_and_files_tests;
#[cfg(test)]
mod tests;

/// Minor of /dev/nvidiactl (nvidia-modprobe-utils.h, `NV_CTL_DEVICE_MINOR`).
const CTL_MINOR: u32 = 255;
/// Minor of /dev/nvidia-modeset (nvidia-modprobe-utils.h, `NV_MODESET_MINOR_DEVICE_NUM`).
const MODESET_MINOR: u32 = 254;

/// The devices with these UUIDs.
fn list_devices<'a>(uuids: &[String], inventory: &'a Inventory) -> Vec<&'a Device> {
    inventory.devices.iter().filter(|device| uuids.contains(&device.uuid)).collect()
}

/// The nodes that `devices` need, control nodes first. A kernel module that is not loaded has no nodes.
fn list_nodes(
    devices: &[&Device],
    capabilities: &Capabilities,
    mig_caps: &[MigCapability],
    inventory: &Inventory,
    config: &Config,
) -> Vec<GrantedNode> {
    let majors = inventory.driver.majors;
    let node = |name: &str, major: Option<u32>, minor| {
        Some(Node { path: Path::new("/dev").join(name), major: major?, minor })
    };
    let control = [
        node("nvidiactl", majors.nvidia, CTL_MINOR),
        node("nvidia-uvm", majors.uvm, 0),
        node("nvidia-uvm-tools", majors.uvm, 1),
    ];
    let mut nodes: Vec<Node> = control.into_iter().flatten().collect();
    nodes.extend(devices.iter().flat_map(|device| device.nodes.clone()));
    if capabilities.has(Capability::Graphics) {
        nodes.extend(node("nvidia-modeset", majors.nvidia, MODESET_MINOR));
        nodes.extend(devices.iter().flat_map(|device| device.dri_nodes.clone()));
    }
    nodes.extend(mig_caps.iter().filter_map(|cap| inventory.driver.mig_cap(*cap)).cloned());
    // MIG devices of one GPU share its node.
    let mut seen = BTreeSet::new();
    nodes.retain(|node| seen.insert(node.path.clone()));
    nodes.into_iter().map(|node| granted(node, config)).collect()
}

fn granted(node: Node, config: &Config) -> GrantedNode {
    let source = crate::fs::under(&config.driver.root, &node.path.to_string_lossy());
    GrantedNode { node, source }
}

/// The number of SMs to assume if NVML does not report it: as many as any GPU has, so that the memory fraction is
/// rather too small than too large.
const MOST_SMS: u64 = 192;

/// The name that frameworks refuse together with `name`. If one is set, sublet does not set the other.
///
/// From version 0.4.33, jaxlib raises `ValueError`, and JAX then computes on the CPU. An empty value counts as unset
/// (`generate_pjrt_gpu_plugin_options` in `jaxlib/xla_client.py`; docs/recipes.md, "What the frameworks read").
pub fn refused_beside(name: &str) -> Option<&'static str> {
    match name {
        "XLA_CLIENT_MEM_FRACTION" => Some("XLA_PYTHON_CLIENT_MEM_FRACTION"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION" => Some("XLA_CLIENT_MEM_FRACTION"),
        _ => None,
    }
}

/// Sets libcuda's directory for Triton, unless the image or the user does.
pub const TRITON_PATH: &str = "TRITON_LIBCUDA_PATH";

/// The edit for `lease`; `library_dir` is where the driver's libraries are mounted, if they are. `neighbours` is the
/// number of other leases on its devices, if it is known.
fn list_environment(
    lease: &Lease,
    neighbours: Option<usize>,
    library_dir: Option<&Path>,
    inventory: &Inventory,
    config: &Config,
) -> Environment {
    // MIG devices have no ordinal of their own (CUDA C++ Programming Guide, "CUDA Environment Variables").
    let mig = lease.devices.iter().any(|uuid| uuid.starts_with("MIG-"));
    let default = if mig { VisibleDevices::Uuid } else { VisibleDevices::Ordinal };
    let mut set = vec![
        pair("CUDA_VISIBLE_DEVICES", listed(lease, config.grant.visible_devices.unwrap_or(default))),
        pair(
            "NVIDIA_VISIBLE_DEVICES",
            config.grant.nvidia_visible_devices.map_or("void".into(), |form| listed(lease, form)),
        ),
        pair("SUBLET_DEVICES", lease.devices.join(",")),
        pair("SUBLET_MODE", lease.mode.to_string()),
        pair("SUBLET_PROCESSES", lease.processes.to_string()),
    ];
    if let Some(neighbours) = neighbours.filter(|_| config.grant.tell_neighbours) {
        set.push(pair("SUBLET_NEIGHBOURS", neighbours.to_string()));
    }
    if lease.daemon.is_some() {
        set.extend(list_mps_variables(lease));
    }
    set.extend(list_sizes(lease, inventory));
    let default = config.grant.env.iter();
    let default = default.filter_map(|(name, text)| Some(pair(name, fill_template(text, &set)?)));
    let triton = library_dir.and_then(Path::to_str).map(|dir| pair(TRITON_PATH, dir));
    let default = default.chain(triton).collect();
    Environment { set, default, remove_prefixes: OWN_PREFIXES.map(String::from).to_vec() }
}

fn pair(name: &str, value: impl Into<String>) -> (String, String) {
    (name.to_owned(), value.into())
}

/// The devices of `lease`, for a program that sees only these. Ordinals count the devices that CUDA enumerates. These are the
/// ones with a node, so the ordinals always begin at 0 and have no gaps.
fn listed(lease: &Lease, form: VisibleDevices) -> String {
    match form {
        VisibleDevices::Uuid => lease.devices.join(","),
        VisibleDevices::Ordinal => {
            (0..lease.devices.len()).map(|ordinal| ordinal.to_string()).collect::<Vec<_>>().join(",")
        }
    }
}

/// The variables that an MPS client reads. The pinned device memory limit has only one entry: if the driver cannot
/// parse an entry, or the client does not see its device, the driver drops every limit. So a lease of several devices
/// has no such variable: a worker that sets `CUDA_VISIBLE_DEVICES` to one of them would have no limit. The server has
/// the limit instead.
fn list_mps_variables(lease: &Lease) -> Vec<(String, String)> {
    let sm = lease.sm_of_process().map(|sm| pair("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", sm.to_string()));
    let memory = lease.memory_of_process().filter(|_| lease.devices.len() == 1);
    let memory = memory.map(|bytes| pair("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={}M", bytes / MIB)));
    let low = (lease.priority == Priority::Low).then(|| pair("CUDA_MPS_CLIENT_PRIORITY", "1"));
    [Some(pair("CUDA_MPS_PIPE_DIRECTORY", MPS_DIR)), sm, memory, low].into_iter().flatten().collect()
}

/// For programs that choose their own size: the memory of one CUDA process on each device. MPS shows them the whole
/// GPU.
fn list_sizes(lease: &Lease, inventory: &Inventory) -> Vec<(String, String)> {
    let memory = lease.memory_of_process();
    let fraction = memory.and_then(|bytes| fraction_of_all(bytes, lease, inventory)).map(|thousandths| {
        pair("SUBLET_MEMORY_FRACTION", format!("{}.{:03}", thousandths / 1000, thousandths % 1000))
    });
    let memory = memory.map(|bytes| pair("SUBLET_MEMORY_BYTES", bytes.to_string()));
    let sm = lease.sm_of_process().map(|sm| pair("SUBLET_SM_PERCENT", sm.to_string()));
    [memory, fraction, sm].into_iter().flatten().collect()
}

/// The smallest [`fraction`] among the lease's devices: a framework applies one to all of them.
fn fraction_of_all(bytes: u64, lease: &Lease, inventory: &Inventory) -> Option<u128> {
    let each =
        lease.devices.iter().map(|uuid| fraction(bytes, lease.sm_of_process(), inventory.device(uuid)?));
    each.collect::<Option<Vec<_>>>()?.into_iter().min()
}

/// (`bytes` − the context's) ÷ the device's total, rounded down to thousandths; `None` if that is zero.
fn fraction(bytes: u64, sm: Option<Percent>, device: &Device) -> Option<u128> {
    let visible = device.sms_at(sm.unwrap_or(Percent::WHOLE)).unwrap_or(MOST_SMS);
    let usable = bytes.saturating_sub(context_bytes(visible));
    let total = u128::from(device.memory_bytes);
    let thousandths = (u128::from(usable) * 1000).checked_div(total)?.min(1000);
    (thousandths > 0).then_some(thousandths)
}

/// `template` with each `${NAME}` replaced from `set`; `None` if a name is missing.
fn fill_template(template: &str, set: &[(String, String)]) -> Option<String> {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("${") {
        let (name, behind) = after.split_once('}')?;
        out.push_str(before);
        out.push_str(&set.iter().find(|(known, _)| known == name)?.1);
        rest = behind;
    }
    out.push_str(rest);
    Some(out)
}
