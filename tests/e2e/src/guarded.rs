//! Containers beside the guard of `sublet serve`: what they run, what it wrote down, and a neighbour who must not
//! notice.

use serde_json::{Value, json};

use crate::bundle::Bundle;
use crate::user::Host;

/// Limits gone by one bad value (docs/evidence).
pub const SPOIL: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage";
/// Away from MPS: neither the variable nor the default place leads to a server.
pub const LEAVE: &str = "CUDA_MPS_PIPE_DIRECTORY=/nowhere";
/// What each asks for; 25 % of an H200 are 32 SMs.
pub const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "4GiB")];

impl Host {
    /// A container with [`SHARE`] that waits, and in it the commands of a shell.
    #[must_use]
    pub fn waiting(&self, id: &str, script: &str) -> Bundle<'_> {
        let script = format!("{script}\nwait; exec sleep 600");
        let bundle = self.world.bundle(id, SHARE, &["/bin/sh", "-c", &script]);
        bundle.up();
        bundle
    }

    /// What the guard did, as it wrote it down: a command of ours would put its ledger right on the way.
    #[must_use]
    pub fn events(&self) -> Vec<Value> {
        let text = std::fs::read(self.world.state_dir().join("guard.json")).unwrap_or_default();
        let book: Value = serde_json::from_slice(&text).unwrap_or_default();
        book["events"].as_array().cloned().unwrap_or_default()
    }

    /// The first of them about `offence`.
    #[must_use]
    pub fn event(&self, offence: &str) -> Option<Value> {
        self.events().into_iter().find(|event| event["offence"] == offence)
    }

    /// A container that keeps to its share all the while.
    #[must_use]
    pub fn neighbour(&self) -> Neighbour<'_> {
        let args = ["/usr/bin/cuda-probe", "hold", "120"];
        let bundle = self.world.bundle("neighbour", SHARE, &args);
        bundle.up();
        assert_eq!(bundle.event("info")["mps"], json!(true));
        Neighbour { host: self, bundle }
    }
}

/// How many of a container's processes are CUDA programs.
#[must_use]
pub fn probes(bundle: &Bundle<'_>) -> usize {
    let seen = bundle.exec(&["/bin/sh", "-c", "cat /proc/[0-9]*/comm"]);
    seen.stdout.lines().filter(|name| *name == "cuda-probe").count()
}

/// Somebody who is to notice nothing.
pub struct Neighbour<'a> {
    host: &'a Host,
    bundle: Bundle<'a>,
}

impl Neighbour<'_> {
    /// Its program runs on, and its next one gets what the first got; then it goes.
    pub fn lives(self) {
        let Self { host, bundle } = self;
        assert!(!bundle.output().contains("\"end\""), "{}", bundle.output());
        let events = host.events();
        assert!(!events.iter().any(|event| event["container_id"] == "neighbour"), "{events:?}");
        let info = bundle.exec(&["/usr/bin/cuda-probe", "info"]).json().remove(0);
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{info}");
        bundle.down();
    }
}
