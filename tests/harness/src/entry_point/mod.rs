//! The ways in which a container gets its share, all to be used alike: `tests/e2e/entry_points.rs` puts one table of
//! requests through each. A new entry point is a file here, a [`Column`] and a test of a few lines there.

mod containerd;
mod docker;
mod look;
mod plain;
mod podman;
mod rootless;

pub use containerd::OfContainerd;
pub use docker::{Asked, OfDocker};
pub use look::{Report, traces};
pub use plain::{How, Plain};
pub use podman::{By, OfPodman};
pub use rootless::OfRootless;

use std::path::PathBuf;

use serde_json::Value;

use crate::bundle::Finished;
use crate::world::{Engine, World};

/// What a container asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Of the container, and of the named share with the same keys.
    pub name: &'static str,
    /// Annotations without the `sublet.` prefix.
    pub keys: &'static [(&'static str, &'static str)],
    /// What its engine is told besides.
    pub with: With,
}

/// What stands beside a share and contradicts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// Nothing.
    Nothing,
    /// `--privileged`, or a bundle's rule that allows every device.
    Privileged,
    /// Another GPU's node as a volume.
    Node,
}

impl Request {
    /// Its annotations.
    #[must_use]
    pub fn annotations(&self) -> Vec<(String, String)> {
        self.keys.iter().map(|(key, value)| (format!("sublet.{key}"), (*value).to_owned())).collect()
    }

    /// Its annotations as options of `docker run` and `podman run`.
    #[must_use]
    pub fn options(&self) -> Vec<String> {
        self.annotations().iter().map(|(key, value)| format!("--annotation={key}={value}")).collect()
    }

    /// The options for what stands beside them.
    #[must_use]
    pub fn more_options(&self, world: &World) -> Vec<String> {
        match self.with {
            With::Nothing => vec![],
            With::Privileged => vec!["--privileged".into()],
            With::Node => vec![format!("--volume={}:{OTHER_NODE}", other_node(world).display())],
        }
    }

    /// The option for the CDI device of its share; nothing where it asks for nothing.
    #[must_use]
    pub fn device(&self) -> Vec<String> {
        let asks = !self.keys.is_empty();
        asks.then(|| format!("--device=sublet/share={}", self.share())).into_iter().collect()
    }

    /// The share that stands for all of its keys.
    #[must_use]
    pub fn share(&self) -> &'static str {
        self.keys.iter().find(|(key, _)| *key == "share").map_or(self.name, |(_, share)| share)
    }

    /// The table of the configuration for a share of this name.
    #[must_use]
    pub fn to_config(&self) -> String {
        let lines: Vec<String> =
            self.keys.iter().map(|(key, value)| format!("{key} = \"{value}\"")).collect();
        format!("[share.{}]\n{}\n", self.name, lines.join("\n"))
    }
}

/// A node that no request of the table is granted.
const OTHER_NODE: &str = "/dev/nvidia6";

/// The same on the host.
fn other_node(world: &World) -> PathBuf {
    let root = world.driver_root.as_ref().expect("simulated");
    root.join(&OTHER_NODE[1..])
}

/// What an entry point cannot offer, each by its nature. All `true` is the whole contract.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "a column of a table")]
pub struct Column {
    /// The environment can be set. Where it cannot, mode mps is always `dedicated`, an explicit `shared` is
    /// refused and `priority` orders nobody (docs/prestart.md).
    pub environment: bool,
    /// Exec'd processes and health checks get the environment too. Where they do not, a shared server's
    /// ceiling holds them (docs/podman.md).
    pub exec_environment: bool,
    /// There is a device cgroup. Where there is none, a container can make no nodes either (docs/rootless.md).
    pub device_cgroup: bool,
    /// A container states its own keys. Where it cannot, it names a share of the configuration
    /// (docs/docker.md, "Without annotations").
    pub annotations: bool,
    /// A share may be of several GPUs, and one that fits none is refused by us. Where not, its engine knows no
    /// such CDI device (docs/cdi.md, "Limits").
    pub any_share: bool,
    /// Whoever starts the container is shown why it is refused. Where not, `sublet status --last-error`
    /// tells (docs/prestart.md: crun keeps what hooks say to itself).
    pub says_why: bool,
}

/// An entry point with all there is to offer.
pub const WHOLE: Column = Column {
    environment: true,
    exec_environment: true,
    device_cgroup: true,
    annotations: true,
    any_share: true,
    says_why: true,
};

/// What a CDI device can offer (docs/cdi.md).
fn cdi_column(engine: Engine) -> Column {
    Column {
        exec_environment: false,
        annotations: false,
        any_share: false,
        says_why: engine == Engine::Runc,
        ..WHOLE
    }
}

/// One way in which a container gets its share.
pub trait EntryPoint {
    /// What it may not offer.
    fn column(&self) -> Column;

    /// Driver, configuration, leases.
    fn world(&self) -> &World;

    /// Starts a container of the world's minimal root filesystem with this request.
    ///
    /// # Errors
    /// All that its engine says when it does not start.
    fn start(&self, request: &Request, args: &[&str]) -> Result<(), String>;

    /// What its first process has printed.
    fn output(&self, request: &Request) -> String;

    /// Runs a command in it as this entry point's engine does.
    fn exec(&self, request: &Request, args: &[&str]) -> Finished;

    /// What a health check prints that runs `cuda-probe info`; empty as long as none has.
    fn health(&self, request: &Request) -> String;

    /// Ends it and keeps its root filesystem.
    fn stop(&self, request: &Request);

    /// Removes what is left of it, started or not.
    fn remove(&self, request: &Request);

    /// The config.json that it runs with; null where the engine shows none.
    fn config(&self, request: &Request) -> Value;
}
