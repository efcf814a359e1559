//! A bundle without the shim: `sublet-hook` gives the share, called as engines call hooks.

use std::fs::{Permissions, set_permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::{Bundle, Finished, World, bin_dir};

/// What an image can set: variables that loaders, libc and sublet itself know.
pub const HOSTILE_ENVIRONMENT: [&str; 8] = [
    "LD_PRELOAD=/proc/self/cwd/x.so",
    "LD_AUDIT=/proc/self/cwd/x.so",
    "LD_LIBRARY_PATH=/proc/self/cwd",
    "GCONV_PATH=/proc/self/cwd",
    "RUST_LOG=trace",
    "SUBLET_CONFIG=/proc/self/cwd/config.toml",
    "CUDA_MPS_PIPE_DIRECTORY=/proc/self/cwd",
    "PATH=/proc/self/cwd:/bin:/usr/bin",
];

/// The container's id in [`Bundle::podmans`].
pub const PODMANS_ID: &str = "452325ed5f7f35588a551450be5d67fde0f40a94317f3f8f8a275a3aebf20f2a";

/// Runs `stage` of the hook `command`, with `input` on its standard input.
#[must_use]
pub fn fed(mut command: Command, stage: &str, input: &[u8]) -> Finished {
    command.arg(stage).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("sublet-hook runs");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_vec();
    // The hook may stop reading before the end.
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().expect("it ends");
    let _ = writer.join().expect("no panic");
    Finished::of(&output)
}

/// The spec as precreate returns it.
#[must_use]
pub fn precreated(command: Command, spec: &Value) -> Value {
    let done = fed(command, "precreate", &serde_json::to_vec(spec).expect("JSON"));
    assert!(done.ok, "precreate: {done:?}");
    serde_json::from_str(&done.stdout).expect("a spec")
}

/// The message with which precreate refuses the container of `spec`.
#[must_use]
pub fn refusal(spec: &Value) -> &str {
    spec["hooks"]["createRuntime"][0]["path"].as_str().unwrap_or_default()
}

/// The CDI specification that [`World::generate_cdi`] has written.
#[must_use]
pub fn cdi_specification(world: &World) -> Value {
    let text = std::fs::read(world.dir.path().join("cdi/sublet.json")).expect("the specification");
    serde_json::from_slice(&text).expect("JSON")
}

impl Bundle<'_> {
    /// Calls the low-level runtime directly, with a config.json as an engine makes it of the first CDI device.
    pub fn inject_cdi(&mut self) {
        self.plain = true;
        let edits = &cdi_specification(self.world)["devices"][0]["containerEdits"];
        let extend = |list: &mut Value, more: Vec<Value>| match list {
            Value::Array(entries) => entries.extend(more),
            other => *other = json!(more),
        };
        let all = |name: &str| edits[name].as_array().expect("an array").clone();
        extend(&mut self.spec["process"]["env"], all("env"));
        let rule = |node: &Value| json!({"allow": true, "type": "c", "major": node["major"], "minor": node["minor"], "access": "rw"});
        let rules = all("deviceNodes").iter().map(rule).collect();
        extend(&mut self.spec["linux"]["resources"]["devices"], rules);
        extend(&mut self.spec["linux"]["devices"], all("deviceNodes"));
        let mut hooks = all("hooks");
        for hook in &mut hooks {
            hook.as_object_mut().expect("a hook").remove("hookName");
        }
        self.spec["hooks"] = json!({"createRuntime": hooks[..1], "poststop": hooks[1..]});
    }

    /// The spec as Podman passes it: with an absolute rootfs, and the id in the cgroup's name.
    #[must_use]
    pub fn podmans(&self) -> Value {
        let mut spec = self.spec.clone();
        spec["root"]["path"] = json!(self.dir.join("rootfs"));
        spec["linux"]["cgroupsPath"] = json!(format!("/libpod_parent/libpod-{PODMANS_ID}"));
        spec
    }

    /// Calls the low-level runtime directly, with sublet's hook at `stages` of config.json.
    pub fn hook(&mut self, stages: &[&str]) {
        self.plain = true;
        for stage in stages {
            let env =
                ["PATH=/usr/bin:/bin".to_owned(), format!("SUBLET_CONFIG={}", self.world.config.display())];
            self.spec["hooks"][*stage] =
                json!([{"path": bin_dir().join("sublet-hook"), "args": ["sublet-hook", stage], "env": env}]);
        }
    }

    /// Calls the low-level runtime directly, with the config.json that sublet's hook makes of this one, as Podman
    /// does.
    pub fn precreate(&mut self) {
        self.plain = true;
        self.spec["root"]["path"] = json!(self.dir.join("rootfs"));
        self.spec = precreated(self.world.command("sublet-hook"), &self.spec);
    }

    /// Adds a user namespace whose root is the host's uid and gid 100000. It gets the rootfs, and access to the path
    /// to it.
    pub fn map_users(&mut self) {
        let linux = self.spec["linux"].as_object_mut().expect("linux");
        linux["namespaces"].as_array_mut().expect("namespaces").push(json!({"type": "user"}));
        let mapping = json!([{"containerID": 0, "hostID": 100_000, "size": 65536}]);
        linux.insert("uidMappings".into(), mapping.clone());
        linux.insert("gidMappings".into(), mapping);
        set_permissions(self.world.dir.path(), Permissions::from_mode(0o755)).expect("chmod");
        let chown = ["-type", "d", "-exec", "chown", "100000:100000", "{}", "+"];
        let owned = Command::new("find").arg(self.dir.join("rootfs")).args(chown).status().expect("find");
        assert!(owned.success(), "chown of the rootfs");
    }
}
