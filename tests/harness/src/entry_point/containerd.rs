//! containerd, by `ctr run --runc-binary`.

use serde_json::Value;

use super::{Column, EntryPoint, OTHER_NODE, Request, WHOLE, With, other_node};
use crate::bundle::Finished;
use crate::containerd::Containerd;
use crate::world::World;

/// containerd as an entry point.
pub struct OfContainerd(Containerd);

impl OfContainerd {
    /// Starts containerd.
    #[must_use]
    pub fn up(world: World) -> Self {
        Self(Containerd::up(world))
    }
}

impl EntryPoint for OfContainerd {
    fn column(&self) -> Column {
        WHOLE
    }

    fn world(&self) -> &World {
        &self.0.world
    }

    fn start(&self, request: &Request, args: &[&str]) -> Result<(), String> {
        let annotations = request.annotations();
        let annotations: Vec<String> =
            annotations.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let annotations: Vec<&str> = annotations.iter().map(String::as_str).collect();
        let source = other_node(self.world());
        let mount = format!("--mount=type=bind,src={},dst={OTHER_NODE},options=bind", source.display());
        let options: &[&str] = match request.with {
            With::Nothing => &[],
            With::Privileged => &["--privileged"],
            With::Node => &[&mount],
        };
        let finished = self.0.run(request.name, &annotations, options, args);
        if finished.ok { Ok(()) } else { Err(finished.stderr) }
    }

    fn output(&self, request: &Request) -> String {
        self.0.written(request.name)
    }

    fn exec(&self, request: &Request, args: &[&str]) -> Finished {
        self.0.exec_heard(request.name, args)
    }

    /// containerd has no health checks.
    fn health(&self, request: &Request) -> String {
        self.exec(request, &["/usr/bin/cuda-probe", "info"]).stdout
    }

    fn stop(&self, request: &Request) {
        self.0.done(&["tasks", "rm", "--force", request.name]);
    }

    fn remove(&self, request: &Request) {
        self.0.remove(request.name);
    }

    fn config(&self, request: &Request) -> Value {
        serde_json::from_str(&self.0.config(request.name)).expect("JSON")
    }
}
