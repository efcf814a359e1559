//! The file that engines read. It is replaced as a whole, only if it changes, and removed if no share is left. Files
//! of other programs are not touched.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use super::list;
use super::share_devices::{Listing, Named};
use sublet_core::admit::{AdmitError, fresh_inventory};
use sublet_core::config::Config;
use sublet_core::grant::GrantedNode;
use sublet_core::oci::cdi::{KIND, STAGE};
use sublet_core::oci::hooks;
use sublet_core::process::inheritance;
use sublet_core::text::safe;

/// A larger file was not written by sublet.
const LONGEST: u64 = 16 << 20;

/// Why the specification is not written.
#[allow(missing_docs, reason = "the message says what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file was written by another program.
    #[error(
        "{} is not a CDI specification of kind {KIND} and was not overwritten: choose another --output",
        safe(&.0.to_string_lossy())
    )]
    NotOurs(PathBuf),
    /// A system call failed.
    #[error("cannot {what} {}: {source}", safe(&path.to_string_lossy()))]
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

/// What is at the specification's path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// There is no file.
    Missing,
    /// sublet wrote the file; this is its text.
    Ours(Vec<u8>),
    /// Another program wrote the file.
    Foreign,
}

/// Reads what is at `path` now. A file that cannot be read counts as another program's.
pub fn state(path: &Path) -> State {
    #[derive(Deserialize)]
    struct Kind {
        kind: String,
    }
    let mut text = Vec::new();
    let read = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return State::Missing,
        Ok(found) if found.is_file() => {
            File::open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut text))
        }
        _ => return State::Foreign,
    };
    let ours = read.is_ok() && serde_json::from_slice::<Kind>(&text).is_ok_and(|spec| spec.kind == KIND);
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
    sublet_core::fs::trusted::create(path.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
    sublet_core::fs::atomic::replace(path, text.as_bytes(), 0o644).map_err(failed)?;
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

/// In seconds. A share may be waited for up to a minute (`sublet.wait`), and a daemon may have to start after that.
const TIMEOUT: u32 = 120;

/// The specification of `listing`: the same text for the same devices. `program` is the hook, `config` the
/// configuration that it reads where that is not the usual one.
pub fn render(listing: &Listing, program: &str, config: Option<&Path>) -> String {
    let devices = listing.devices.iter().map(|named| device(named, program, config));
    let spec = json!({"cdiVersion": VERSION, "kind": KIND, "devices": devices.collect::<Vec<_>>()});
    format!("{spec:#}\n")
}

fn device(named: &Named, program: &str, config: Option<&Path>) -> Value {
    let hook = |name: &str, stage: &str| {
        json!({
            "hookName": name,
            "path": program,
            "args": named.asked.arguments(stage),
            "env": hooks::environment(config),
            "timeout": TIMEOUT,
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
    use crate::cdi_spec::list;
    use sublet_core::inventory::{Majors, Node};
    use sublet_core::place::fixture::{device, host};

    use super::*;

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
        let config = toml::from_str("[share.small]\nsm = 25\nmemory = '8GiB'\n").unwrap();
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
        assert_eq!(hook["args"], json!(["sublet-hook", "cdi", "--share", "small", "--device", "GPU-3"]));
        assert_eq!(hook["env"][1], "SUBLET_CONFIG=/c.toml");
        assert_eq!(edits["hooks"][1]["args"][1], "poststop");
        assert!(edits["hooks"][1]["env"][0].as_str().unwrap().starts_with("PATH=/"));
    }
}
