//! The entry points, all used in the same way: `tests/e2e/entry_points.rs` sends one table of requests through each of
//! them. A new entry point is a file here, a [`Column`], and a test of a few lines there.

mod containerd;
mod docker;
mod look;
mod plain_bundle;
mod podman;
mod rootless;

pub use containerd::OfContainerd;
pub use docker::{Asked, OfDocker};
pub use look::{Report, traces};
pub use plain_bundle::{How, Plain};
pub use podman::{By, OfPodman};
pub use rootless::OfRootless;

use std::path::PathBuf;

use serde_json::Value;

use crate::bundle::Finished;
use crate::world::{Engine, World};

/// What a container asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The name of the container, and of the named share with the same keys.
    pub name: &'static str,
    /// Annotations without the `sublet.` prefix.
    pub keys: &'static [(&'static str, &'static str)],
    /// A setting of the container that contradicts the share.
    pub with: With,
}

/// Settings beside a share that contradict it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// Nothing.
    Nothing,
    /// `--privileged`, or a bundle's rule that allows every device.
    Privileged,
    /// Another GPU's node, as a volume.
    Node,
}

impl Request {
    /// The annotations.
    #[must_use]
    pub fn annotations(&self) -> Vec<(String, String)> {
        self.keys.iter().map(|(key, value)| (format!("sublet.{key}"), (*value).to_owned())).collect()
    }

    /// The annotations as options of `docker run` and `podman run`.
    #[must_use]
    pub fn options(&self) -> Vec<String> {
        self.annotations().iter().map(|(key, value)| format!("--annotation={key}={value}")).collect()
    }

    /// The options for [`Self::with`].
    #[must_use]
    pub fn more_options(&self, world: &World) -> Vec<String> {
        match self.with {
            With::Nothing => vec![],
            With::Privileged => vec!["--privileged".into()],
            With::Node => vec![format!("--volume={}:{OTHER_NODE}", other_node(world).display())],
        }
    }

    /// The option for the CDI device of the share; none if the request has no keys.
    #[must_use]
    pub fn device(&self) -> Vec<String> {
        let asks = !self.keys.is_empty();
        asks.then(|| format!("--device=sublet/share={}", self.share())).into_iter().collect()
    }

    /// The named share that stands for all its keys.
    #[must_use]
    pub fn share(&self) -> &'static str {
        self.keys.iter().find(|(key, _)| *key == "share").map_or(self.name, |(_, share)| share)
    }

    /// The configuration table of a share with this name.
    #[must_use]
    pub fn to_config(&self) -> String {
        let lines: Vec<String> =
            self.keys.iter().map(|(key, value)| format!("{key} = \"{value}\"")).collect();
        format!("[share.{}]\n{}\n", self.name, lines.join("\n"))
    }
}

/// A node that no request of the table is granted.
const OTHER_NODE: &str = "/dev/nvidia6";

/// The path of that node on the host.
fn other_node(world: &World) -> PathBuf {
    let root = world.driver_root.as_ref().expect("simulated");
    root.join(&OTHER_NODE[1..])
}

/// What an entry point can offer by its nature. If all are `true`, it offers everything.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "a column of a table")]
pub struct Column {
    /// The environment can be set. Otherwise mode mps is always `dedicated`, an explicit `shared` is refused, and
    /// `priority` has no effect (docs/prestart.md).
    pub environment: bool,
    /// Processes started by exec and health checks get the environment too. Otherwise the default limits of a shared
    /// server bound them (docs/podman.md).
    pub exec_environment: bool,
    /// There is a device cgroup. Without one, a container cannot create nodes either (docs/rootless.md).
    pub device_cgroup: bool,
    /// A container states its own keys. Otherwise it names a share of the configuration (docs/docker.md, "Without
    /// annotations").
    pub annotations: bool,
    /// A share may have several GPUs, and sublet itself refuses one that fits no GPU. Otherwise the engine knows no
    /// such CDI device (docs/cdi.md, "Limits").
    pub any_share: bool,
    /// The user who starts the container sees why it is refused. Otherwise `sublet status --last-error` says it
    /// (docs/prestart.md: crun does not show what hooks print).
    pub says_why: bool,
}

/// An entry point that offers everything.
pub const WHOLE: Column = Column {
    environment: true,
    exec_environment: true,
    device_cgroup: true,
    annotations: true,
    any_share: true,
    says_why: true,
};

/// What a CDI device offers (docs/cdi.md).
fn cdi_column(engine: Engine) -> Column {
    Column {
        exec_environment: false,
        annotations: false,
        any_share: false,
        says_why: engine == Engine::Runc,
        ..WHOLE
    }
}

/// A way by which a container gets its share.
pub trait EntryPoint {
    /// What this entry point offers.
    fn column(&self) -> Column;

    /// The driver, configuration and leases.
    fn world(&self) -> &World;

    /// Starts a container with this request from the world's minimal root filesystem.
    ///
    /// # Errors
    /// The engine's output if the container does not start.
    fn start(&self, request: &Request, args: &[&str]) -> Result<(), String>;

    /// The output of the container's first process so far.
    fn output(&self, request: &Request) -> String;

    /// Runs a command in the container through its engine.
    fn exec(&self, request: &Request, args: &[&str]) -> Finished;

    /// The output of a health check that runs `cuda-probe info`; empty until one has run.
    fn health(&self, request: &Request) -> String;

    /// Ends the container and keeps its root filesystem.
    fn stop(&self, request: &Request);

    /// Removes what is left of the container, whether it started or not.
    fn remove(&self, request: &Request);

    /// The config.json that the container runs with; null if the engine does not show it.
    fn config(&self, request: &Request) -> Value;
}
