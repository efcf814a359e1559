//! The CDI specification as text.

use std::path::Path;

use serde_json::{Value, json};

use super::share_devices::{Listing, Named};
use sublet_core::grant::GrantedNode;
use sublet_core::oci::cdi::{KIND, STAGE};
use sublet_core::oci::hooks;

/// The lowest version that has everything used here: device names that begin with a digit need 0.5.0 (SPEC.md,
/// "Released versions"). Podman reads it since 4.3.
const VERSION: &str = "0.5.0";

/// In seconds. A share may be waited for up to a minute (`sublet.wait`), and a daemon may have to start after that.
const TIMEOUT: u32 = 120;

/// The specification of `listing`: the same text for the same devices. `program` is the hook, `config` the
/// configuration that it reads where that is not the usual one.
#[must_use]
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
    use super::*;
    use crate::cdi_spec::list;
    use sublet_core::inventory::{Majors, Node};
    use sublet_core::place::fixture::{device, host};

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
