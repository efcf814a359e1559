//! A user's Podman, with the hook or with the shim, through `sublet serve`.

use serde_json::Value;

use super::podman::annotations;
use super::{Column, EntryPoint, Request, WHOLE};
use crate::bundle::Finished;
use crate::rootless::{Rootless, done};
use crate::world::World;

/// Rootless Podman as an entry point.
pub struct OfRootless {
    rootless: Rootless,
    by_hook: bool,
}

impl OfRootless {
    /// Starts the service too. The world's configuration allows the user `tester` a share.
    #[must_use]
    pub fn up(world: World, by_hook: bool) -> Self {
        let rootless = Rootless::serving(world);
        if !by_hook {
            std::fs::remove_file(rootless.dir().join("hooks/sublet.json")).expect("the hook was there");
        }
        Self { rootless, by_hook }
    }

    fn podman(&self, arguments: &[&str]) -> Finished {
        Finished::of(&self.rootless.podman(arguments).output().expect("podman runs"))
    }
}

impl EntryPoint for OfRootless {
    fn column(&self) -> Column {
        Column { exec_environment: !self.by_hook, device_cgroup: false, ..WHOLE }
    }

    fn world(&self) -> &World {
        &self.rootless.world
    }

    fn start(&self, request: &Request, args: &[&str]) -> Result<(), String> {
        let mut options = annotations(request);
        let shim = self.rootless.dir().join("bin/shim");
        options.extend((!self.by_hook).then(|| format!("--runtime={}", shim.display())));
        options.extend(request.more_options(&self.rootless.world));
        options.extend(["--health-cmd=cuda-probe info".to_owned(), "--health-interval=disable".to_owned()]);
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let finished = Finished::of(&self.rootless.run(request.name, &options, &[], args));
        if finished.ok { Ok(()) } else { Err(finished.stderr) }
    }

    fn output(&self, request: &Request) -> String {
        self.podman(&["logs", request.name]).stdout
    }

    fn exec(&self, request: &Request, args: &[&str]) -> Finished {
        self.podman(&[&["exec", request.name], args].concat())
    }

    fn health(&self, request: &Request) -> String {
        let _ = self.podman(&["healthcheck", "run", request.name]);
        let log = ["inspect", "--format", "{{json .State.Health.Log}}", request.name];
        let log: Value = serde_json::from_str(&done(&mut self.rootless.podman(&log))).expect("JSON");
        log[0]["Output"].as_str().unwrap_or_default().to_owned()
    }

    fn stop(&self, request: &Request) {
        done(&mut self.rootless.podman(&["stop", "-t0", request.name]));
    }

    fn remove(&self, request: &Request) {
        // A container that could not be started may already be gone.
        let _ = self.podman(&["rm", "-f", "-t0", request.name]);
    }

    fn config(&self, request: &Request) -> Value {
        let path = ["inspect", "--format", "{{.OCIConfigPath}}", request.name];
        let path = done(&mut self.rootless.podman(&path));
        serde_json::from_slice(&std::fs::read(path.trim()).expect("config.json")).expect("JSON")
    }
}
