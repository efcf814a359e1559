//! The CDI specification that `sublet cdi generate` writes, with named shares as devices. How a container that
//! asks for one is recognized: `sublet_core::admit::request_of`.
//!
//! Each named share is a device on each GPU or MIG device that it fits. Current leases do not count: a share keeps its CDI
//! device on a device that is full.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use sublet_core::admit::{AdmitError, fresh_inventory, lease_for};
use sublet_core::config::Config;
use sublet_core::fs::{create_directories, replace};
use sublet_core::grant::{Grant, GrantedNode, Image, grant};
use sublet_core::inventory::{Device, Inventory, check_node};
use sublet_core::ledger::{Container, LeaseId, Ledger};
use sublet_core::oci::cdi::{Asked, KIND, STAGE};
use sublet_core::oci::hooks;
use sublet_core::place::{Placement, only, place_within, wants_mig};
use sublet_core::process::{Process, inheritance};
use sublet_core::request::{self, Request};
use sublet_core::text::safe_path;

/// The CDI devices, and the shares that have none.
#[derive(Debug, Default)]
pub struct Listing {
    /// The devices, by share and GPU.
    pub devices: Vec<Named>,
    /// The shares or devices for which there is no CDI device.
    pub without: Vec<Without>,
    /// How long the hooks may take, in seconds.
    hook_timeout: u64,
}

/// One CDI device.
#[derive(Clone, Debug)]
pub struct Named {
    /// The name that follows `sublet/share=`.
    pub name: String,
    /// Share and device.
    pub asked: Asked,
    /// NVML's index of the GPU.
    pub index: u32,
    /// The number that names the device in `sublet.gpu`: `0`, or `0:2` of a MIG device.
    pub number: String,
    /// The grant of every container with this device: the nodes and `env.set` of this grant.
    pub grant: Grant,
}

/// A share that has no CDI device, or not on this device, or not by its plain name.
#[derive(Debug, PartialEq, Eq)]
pub struct Without {
    /// The name that does not exist.
    pub name: String,
    /// The reason.
    pub why: String,
}

/// The CDI devices of `config`'s named shares on the devices of `inventory`.
pub fn list(config: &Config, inventory: &Inventory) -> io::Result<Listing> {
    // The hook checks what is free when a container starts.
    let host = Host { config, idle: inventory.idle() };
    let hook_timeout = config.limits.wait_max.as_secs() + BESIDE_WAIT;
    let mut listing = Listing { hook_timeout, ..Listing::default() };
    for share in config.share.keys() {
        match host.wanted(share) {
            Ok(request) => host.of_share(share, &request, &mut listing)?,
            Err(why) => listing.without.push(Without { name: share.clone(), why }),
        }
    }
    Ok(listing)
}

struct Host<'a> {
    config: &'a Config,
    /// The devices, as if nothing used them.
    idle: Inventory,
}

impl Host<'_> {
    /// The request of `share`, if a single device can serve it and CDI can name it.
    fn wanted(&self, share: &str) -> Result<Request, String> {
        // SPEC.md, "Kind requirements": a device's name ends as it begins.
        if !share.ends_with(|last: char| last.is_ascii_alphanumeric()) {
            return Err(
                "the name of a CDI device has to end with a letter or digit: rename the share".to_owned()
            );
        }
        let is_index = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b':');
        let of_another = share
            .rsplit_once('.')
            .filter(|(before, index)| self.config.share.contains_key(*before) && is_index(index));
        if let Some((before, index)) = of_another {
            return Err(format!(
                "its name would mean share {before} on GPU {index}: rename one of the two shares"
            ));
        }
        let request = request::parse(&BTreeMap::new(), Some(share), None, self.config);
        let request = request.map_err(|error| error.to_string())?;
        if self.idle.gpus().next().is_none() { Err("this host has no GPU".to_owned()) } else { Ok(request) }
    }

    fn of_share(&self, share: &str, request: &Request, listing: &mut Listing) -> io::Result<()> {
        let (mut here, mig) = (Vec::new(), wants_mig(request));
        if mig && !self.idle.devices.iter().any(Device::is_mig) {
            let why =
                "it needs a MIG device, and this host has none: `sublet mig apply` creates them".to_owned();
            listing.without.push(Without { name: share.to_owned(), why });
        }
        for device in self.idle.devices.iter().filter(|device| device.is_mig() == mig) {
            let name = format!("{share}.{}", device.number());
            match self.on_device(request, device)? {
                Ok(grant) => {
                    let asked = Asked { share: share.to_owned(), device: device.uuid.clone() };
                    here.push(Named { name, asked, index: device.index, number: device.number(), grant });
                }
                Err(why) => listing.without.push(Without { name, why }),
            }
        }
        match &here[..] {
            [] => {}
            [one] => here.insert(0, Named { name: share.to_owned(), ..one.clone() }),
            [first, ..] => {
                let kind = if mig { "MIG devices" } else { "GPUs" };
                let why = format!("{} {kind} can serve it: name one, such as {}", here.len(), first.name);
                listing.without.push(Without { name: share.to_owned(), why });
            }
        }
        listing.devices.append(&mut here);
        Ok(())
    }

    /// The grant of a container with that share on `device`, whatever its image.
    fn on_device(&self, request: &Request, device: &Device) -> io::Result<Result<Grant, String>> {
        let Host { config, idle } = self;
        let request = match only(request, &device.uuid, idle, config) {
            Ok(request) => request,
            Err(why) => return Ok(Err(why)),
        };
        if !request.default_directory {
            return Ok(Err("its default_directory = false needs sublet-runtime".to_owned()));
        }
        let id = LeaseId::random()?;
        let placement = match place_within(&request, &id, idle, &Ledger::empty(""), config, &|_| true) {
            // The file is for containers of other times.
            Ok(placement) => Placement { neighbours: None, ..placement },
            Err(refusal) => return Ok(Err(refusal.to_string())),
        };
        let (container, image) = (Container::default(), Image::default());
        let lease = lease_for(&container, Process::current()?, &placement, &image, id, config);
        let mut grant = grant(&placement, &lease, &request.capabilities, &image, idle, &request.over(config));
        let root = &config.driver.root;
        grant.nodes.retain(|GrantedNode { node, .. }| !node.is_optional() || check_node(root, node).is_ok());
        Ok(Ok(grant))
    }
}

// The file that engines read. It is replaced as a whole, only if it changes, and removed if no share is left. Files of
// other programs are not touched.

/// A larger file was not written by sublet.
const LONGEST: u64 = 16 << 20;

/// Why the specification is not written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file was written by another program.
    #[error(
        "{} is not a CDI specification of kind {KIND} and was not overwritten: choose another --output",
        safe_path(.0)
    )]
    NotOurs(PathBuf),
    /// A system call failed.
    #[error("cannot {what} {}: {source}", safe_path(path))]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    /// The inventory cannot be read, or a share cannot be resolved.
    #[error(transparent)]
    Admit(#[from] AdmitError),
    /// No program for the engines to run.
    #[error("sublet-hook is missing, and CDI devices need it: install it as /usr/libexec/sublet/sublet-hook")]
    NoHook,
    /// An internal error while listing the shares.
    #[error("cannot list the shares: {0}")]
    List(io::Error),
}

/// The state of the specification's path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// There is no file.
    Missing,
    /// sublet wrote the file; this is its text.
    Ours(Vec<u8>),
    /// Another program wrote the file.
    Foreign,
}

/// The state of `path` now. A file that cannot be read counts as another program's.
pub fn state(path: &Path) -> State {
    let mut text = Vec::new();
    let read = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return State::Missing,
        Ok(found) if found.is_file() => {
            File::open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut text))
        }
        _ => return State::Foreign,
    };
    let ours = read.is_ok() && serde_json::from_slice::<Value>(&text).is_ok_and(|spec| spec["kind"] == KIND);
    if ours { State::Ours(text) } else { State::Foreign }
}

/// Writes `text` to `path` and creates its directory if needed. Returns whether anything changed.
///
/// # Errors
/// The file cannot be written, or another program wrote the one that is there.
pub fn write(path: &Path, text: &str) -> Result<bool, FileError> {
    match state(path) {
        State::Ours(before) if before == text.as_bytes() => return Ok(false),
        State::Foreign => return Err(FileError::NotOurs(path.to_owned())),
        State::Ours(_) | State::Missing => {}
    }
    let failed = |source| FileError::Io { what: "write", path: path.to_owned(), source };
    create_directories(path.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
    replace(path, text.as_bytes(), 0o644).map_err(failed)?;
    Ok(true)
}

/// Removes sublet's specification at `path`. Returns whether there was one.
pub fn remove(path: &Path) -> Result<bool, FileError> {
    if !matches!(state(path), State::Ours(_)) {
        return Ok(false);
    }
    let failed = |source| FileError::Io { what: "remove", path: path.to_owned(), source };
    fs::remove_file(path).map_err(failed)?;
    Ok(true)
}

/// Brings the file that `config` names up to date with the shares and devices. `sublet serve` does this every few
/// seconds. Without a named share the driver is not read.
///
/// # Errors
/// The driver cannot be read, and the file stays as it was; or the file cannot be written.
pub(crate) fn keep(config: &Config) -> Result<bool, FileError> {
    let path = &config.cdi.spec;
    if config.share.is_empty() {
        return remove(path);
    }
    let listing = list(config, &fresh_inventory(config)?).map_err(FileError::List)?;
    if listing.devices.is_empty() {
        return remove(path);
    }
    let program = hooks::program().ok_or(FileError::NoHook)?;
    write(path, &render(&listing, &program, inheritance::honoured_config().as_deref()))
}

// The CDI specification as text.

/// The lowest version that has everything used here: device names that begin with a digit need 0.5.0 (SPEC.md,
/// "Released versions"). Podman reads it since 4.3.
const VERSION: &str = "0.5.0";

/// How long the hooks may take beside `sublet.wait`, in seconds: a daemon may have to start.
const BESIDE_WAIT: u64 = 60;

/// The specification of `listing`: the same text for the same devices. `program` is the hook, `config` the
/// configuration that it reads where that is not the usual one.
pub fn render(listing: &Listing, program: &str, config: Option<&Path>) -> String {
    let devices = listing.devices.iter().map(|named| device(named, listing.hook_timeout, program, config));
    let spec = json!({"cdiVersion": VERSION, "kind": KIND, "devices": devices.collect::<Vec<_>>()});
    format!("{spec:#}\n")
}

fn device(named: &Named, timeout: u64, program: &str, config: Option<&Path>) -> Value {
    let hook = |name: &str, stage: &str| {
        json!({
            "hookName": name,
            "path": program,
            "args": named.asked.arguments(stage),
            "env": hooks::environment(config),
            "timeout": timeout,
        })
    };
    let env: Vec<String> =
        named.grant.env.set.iter().map(|(name, value)| format!("{name}={value}")).collect();
    json!({
        "name": named.name,
        "containerEdits": {
            "env": env,
            "deviceNodes": named.grant.nodes.iter().map(node).collect::<Vec<_>>(),
            "hooks": [hook("createRuntime", STAGE), hook("poststop", "poststop")],
        },
    })
}

/// The node's owner and mode are given, because otherwise an engine gives the node to the container's user. The
/// permissions lack `m`: the runtime creates the node, the container does not.
fn node(granted: &GrantedNode) -> Value {
    let node = &granted.node;
    json!({
        "path": node.path,
        "type": "c",
        "major": node.major,
        "minor": node.minor,
        "fileMode": 0o666,
        "permissions": "rw",
        "uid": 0,
        "gid": 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::inventory::{ComputeMode, Majors, Node};
    use sublet_core::place::fixture::{GIB, device, host, part, process};

    fn listed(toml: &str, inventory: &Inventory) -> Listing {
        list(&toml::from_str(toml).unwrap(), inventory).unwrap()
    }

    fn names(listing: &Listing) -> Vec<(&str, &str)> {
        listing.devices.iter().map(|named| (named.name.as_str(), named.asked.device.as_str())).collect()
    }

    fn why<'a>(listing: &'a Listing, name: &str) -> &'a str {
        let found = listing.without.iter().find(|without| without.name == name);
        &found.unwrap_or_else(|| panic!("{name}: {:?}", listing.without)).why
    }

    #[test]
    fn a_share_has_a_device_on_each_gpu_it_fits_and_its_plain_name_if_that_is_one() {
        let mut small = device(1);
        small.memory_bytes = 10 * GIB;
        let host = host(vec![device(0), small]);
        let listing = listed("[share.a]\nsm = 25\n[share.b]\nmemory = '20GiB'\n[share.c]\ngpu = 1\n", &host);
        assert_eq!(
            names(&listing),
            [
                ("a.0", "GPU-0"),
                ("a.1", "GPU-1"),
                ("b", "GPU-0"),
                ("b.0", "GPU-0"),
                ("c", "GPU-1"),
                ("c.1", "GPU-1")
            ]
        );
        assert_eq!(why(&listing, "a"), "2 GPUs can serve it: name one, such as a.0");
        assert!(why(&listing, "b.1").contains("10 GiB, of which"), "{:?}", listing.without);
        assert_eq!(why(&listing, "c.0"), "its sublet.gpu names other GPUs");
    }

    #[test]
    fn a_state_of_the_moment_changes_nothing() {
        let mut busy = device(0);
        busy.memory_free_bytes = 0;
        busy.compute_mode = ComputeMode::ExclusiveProcess;
        busy.processes = vec![process(1, 1, GIB)];
        let toml =
            "[share.a]\nmode = 'exclusive'\n[share.b]\nmemory = '20GiB'\n[share.c]\nmode = 'time-slice'\n";
        let (busy, idle) = (listed(toml, &host(vec![busy])), listed(toml, &host(vec![device(0)])));
        assert_eq!(names(&busy), names(&idle));
        assert_eq!(busy.devices.len(), 6);
        assert_eq!(busy.without, []);
    }

    #[test]
    fn shares_of_mig_devices_have_one_on_each_that_fits() {
        let gpu = Device { mig_enabled: true, ..device(0) };
        let parts = [part(&gpu, 0, "1g.18gb"), part(&gpu, 1, "1g.18gb"), part(&gpu, 2, "2g.35gb")];
        let mut host = host(vec![gpu, device(1)]);
        host.devices.splice(1..1, parts);
        let toml = "[share.a]\nmig = '1g.18gb'\n[share.b]\nmig = '2g.35gb'\nsm = 50\n[share.c]\ngpu = '0:1'\n\
                    [share.d]\nsm = 25\n[share.e]\nmode = 'mig'\ngpu = 1\n[share.'a.0:9']\nsm = 5\n";
        let listing = listed(toml, &host);
        let expected = [
            ("a.0:0", "MIG-0"),
            ("a.0:1", "MIG-1"),
            ("b", "MIG-2"),
            ("b.0:2", "MIG-2"),
            ("c", "MIG-1"),
            ("c.0:1", "MIG-1"),
            ("d", "GPU-1"),
            ("d.1", "GPU-1"),
        ];
        assert_eq!(names(&listing), expected);
        assert_eq!(why(&listing, "a"), "2 MIG devices can serve it: name one, such as a.0:0");
        assert!(
            why(&listing, "a.0:2").contains("no MIG device is a 1g.18gb; why: 0:2 is a 2g.35gb"),
            "{:?}",
            listing.without
        );
        assert!(why(&listing, "d.0").contains("is in MIG mode"), "{:?}", listing.without);
        assert_eq!(why(&listing, "e.0:0"), "its sublet.gpu names other GPUs");
        assert!(why(&listing, "a.0:9").contains("its name would mean share a on GPU 0:9"));
    }

    #[test]
    fn shares_of_several_devices_of_mig_and_with_ambiguous_names_have_none() {
        let host = host(vec![device(0), device(1)]);
        let toml = "[share.two]\ngpu = 'any:2'\n[share.all]\ngpu = 'all'\n[share.mig]\nmig = '1g.18gb'\n\
                    [share.end-]\nsm = 5\n[share.a]\nsm = 5\n[share.'a.7']\nsm = 5\n[share.'a.b']\nsm = 5\n";
        let listing = listed(toml, &host);
        let found: Vec<_> = names(&listing).into_iter().map(|(name, _)| name).collect();
        assert_eq!(found, ["a.0", "a.1", "a.b.0", "a.b.1"]);
        assert!(why(&listing, "two.0").contains("several"), "{:?}", listing.without);
        assert!(why(&listing, "all.1").contains("several"));
        assert!(why(&listing, "mig").contains("it needs a MIG device, and this host has none"));
        assert!(why(&listing, "end-").contains("rename"));
        assert_eq!(
            why(&listing, "a.7"),
            "its name would mean share a on GPU 7: rename one of the two shares"
        );
    }

    #[test]
    fn only_our_own_file_is_replaced_or_removed_and_only_where_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/cdi/sublet.json");
        let ours = |n: u32| format!("{{\"kind\":\"sublet/share\",\"n\":{n}}}");
        assert!(!remove(&path).unwrap());
        assert!(write(&path, &ours(1)).unwrap());
        assert!(!write(&path, &ours(1)).unwrap());
        assert!(write(&path, &ours(2)).unwrap());
        assert_eq!(state(&path), State::Ours(ours(2).into_bytes()));
        assert!(remove(&path).unwrap());
        for foreign in ["", "{}", "{\"kind\":\"nvidia.com/gpu\"}"] {
            fs::write(&path, foreign).unwrap();
            assert!(matches!(write(&path, &ours(1)), Err(FileError::NotOurs(_))));
            assert!(!remove(&path).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap(), foreign);
        }
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        assert_eq!(state(&path), State::Foreign);
    }

    #[test]
    fn a_device_has_its_nodes_its_environment_and_our_hooks() {
        let mut gpu = device(3);
        gpu.nodes = vec![Node { path: "/dev/nvidia3".into(), major: 195, minor: 3 }];
        let mut host = host(vec![gpu]);
        host.driver.majors = Majors { nvidia: Some(195), uvm: None, caps: None };
        let shares = "limits.wait_max = '10m'\n[share.small]\nsm = 25\nmemory = '8GiB'\n";
        let config = toml::from_str(shares).unwrap();
        let text = render(&list(&config, &host).unwrap(), "/x/sublet-hook", Some(Path::new("/c.toml")));
        let spec: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&spec["cdiVersion"], &spec["kind"]), (&json!("0.5.0"), &json!("sublet/share")));
        assert_eq!(
            (&spec["devices"][0]["name"], &spec["devices"][1]["name"]),
            (&json!("small"), &json!("small.3"))
        );
        let edits = &spec["devices"][0]["containerEdits"];
        assert_eq!(*edits, spec["devices"][1]["containerEdits"]);
        assert_eq!(
            edits["env"],
            json!([
                "CUDA_VISIBLE_DEVICES=0",
                "NVIDIA_VISIBLE_DEVICES=void",
                "SUBLET_DEVICES=GPU-3",
                "SUBLET_MODE=mps",
                "SUBLET_PROCESSES=1",
                "CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps",
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M",
                "SUBLET_MEMORY_BYTES=8589934592",
                "SUBLET_MEMORY_FRACTION=0.078",
                "SUBLET_SM_PERCENT=25",
            ])
        );
        let node = |name: &str, minor| {
            json!({"path": name, "type": "c", "major": 195, "minor": minor, "fileMode": 438,
                   "permissions": "rw", "uid": 0, "gid": 0})
        };
        assert_eq!(edits["deviceNodes"], json!([node("/dev/nvidiactl", 255), node("/dev/nvidia3", 3)]));
        let hook = &edits["hooks"][0];
        assert_eq!((&hook["hookName"], &hook["path"]), (&json!("createRuntime"), &json!("/x/sublet-hook")));
        assert_eq!(hook["timeout"], 660, "it may wait for ten minutes");
        assert_eq!(hook["args"], json!(["sublet-hook", "cdi", "--share", "small", "--device", "GPU-3"]));
        assert_eq!(hook["env"][1], "SUBLET_CONFIG=/c.toml");
        assert_eq!(edits["hooks"][1]["args"][1], "poststop");
        assert!(edits["hooks"][1]["env"][0].as_str().unwrap().starts_with("PATH=/"));
    }
}
