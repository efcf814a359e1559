//! A bundle without the shim: `sublet-hook` gives the share, as engines that take hooks run it.

use std::fs::{Permissions, set_permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::{Bundle, Finished, bin_dir};

impl Bundle<'_> {
    /// The low-level runtime itself is called, with our hook at `stages` of config.json.
    pub fn hook(&mut self, stages: &[&str]) {
        self.plain = true;
        for stage in stages {
            let env =
                ["PATH=/usr/bin:/bin".to_owned(), format!("SUBLET_CONFIG={}", self.world.config.display())];
            self.spec["hooks"][*stage] =
                json!([{"path": bin_dir().join("sublet-hook"), "args": ["sublet-hook", stage], "env": env}]);
        }
    }

    /// The low-level runtime itself is called, with the config.json that our hook makes of this one, as
    /// Podman does.
    pub fn precreate(&mut self) {
        self.plain = true;
        self.spec["root"]["path"] = json!(self.dir.join("rootfs"));
        let mut command = self.world.command("sublet-hook");
        command.arg("precreate").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("sublet-hook runs");
        let input = serde_json::to_vec(&self.spec).expect("a spec is JSON");
        child.stdin.take().expect("piped").write_all(&input).expect("it reads");
        let done = Finished::of(&child.wait_with_output().expect("it ends"));
        assert!(done.ok, "precreate: {done:?}");
        self.spec = serde_json::from_str::<Value>(&done.stdout).expect("a spec");
    }

    /// A user namespace whose root is the host's uid and gid 100000. The rootfs becomes its own, and the way
    /// there open to it.
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
