//! Podman as root, with the hook, with `--runtime` or with a CDI device.

use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

use super::{Column, EntryPoint, Request, WHOLE, cdi_column};
use crate::bundle::Finished;
use crate::podman::{CdiOffer, IMAGE, Podman};
use crate::world::World;

/// How `podman run` gets a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The hook.
    Hook,
    /// `--runtime sublet`, without the hook.
    Runtime,
    /// `--device sublet/share=<share>`, without hook or runtime.
    Device,
}

/// A Podman with its own storage.
pub struct OfPodman {
    podman: Podman,
    by: By,
    /// Dropped last: it gives back the place of the CDI specification.
    _offer: Option<CdiOffer>,
}

impl OfPodman {
    /// A new Podman for this entry point.
    #[must_use]
    pub fn up(world: World, by: By) -> Self {
        let podman = Podman::up(world);
        let offer = (by == By::Device).then(|| podman.offer_cdi());
        let mut entry_point = Self { podman, by, _offer: offer };
        entry_point.go_by(by);
        entry_point
    }

    /// Switches this Podman to another entry point.
    pub fn go_by(&mut self, by: By) {
        let file = self.podman.world.dir.path().join("hooks/sublet.json");
        if by == By::Hook {
            std::fs::write(file, self.podman.hook().to_string()).expect("the hook is written");
        } else if file.exists() {
            std::fs::remove_file(file).expect("the hook was there");
        }
        self.by = by;
    }
}

/// Whether Podman cuts annotations at commas unless they are quoted, as version 4 does (docs/podman.md).
static CUTS: LazyLock<bool> = LazyLock::new(|| {
    let version = Command::new("podman").arg("--version").output().expect("podman is installed");
    String::from_utf8_lossy(&version.stdout).starts_with("podman version 4.")
});

/// The annotations as Podman's options.
pub(super) fn annotations(request: &Request) -> Vec<String> {
    let option = |(key, value): &(String, String)| {
        let quote = if *CUTS && value.contains(',') { "\"" } else { "" };
        format!("--annotation={quote}{key}={value}{quote}")
    };
    request.annotations().iter().map(option).collect()
}

impl EntryPoint for OfPodman {
    fn column(&self) -> Column {
        match self.by {
            By::Hook => Column { exec_environment: false, ..WHOLE },
            By::Runtime => WHOLE,
            By::Device => cdi_column(self.world().engine),
        }
    }

    fn world(&self) -> &World {
        &self.podman.world
    }

    fn start(&self, request: &Request, args: &[&str]) -> Result<(), String> {
        // MKNOD is a default of Docker but not of Podman. Even a container that may create nodes cannot open more of
        // them.
        let mut options = vec!["--cap-add=MKNOD".to_owned(), "--hostname=test".to_owned()];
        options.extend(if self.by == By::Device { request.device() } else { annotations(request) });
        options.extend(request.more_options(&self.podman.world));
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let runtime: &[&str] = if self.by == By::Runtime { &["--runtime=sublet"] } else { &[] };
        let run = ["run", "-d", "--name", request.name];
        let health = ["--health-cmd=cuda-probe info", "--health-interval=disable"];
        let finished = self.podman.cli(&[runtime, &run, &health[..], &options, &[IMAGE], args].concat());
        if finished.ok { Ok(()) } else { Err(finished.stderr) }
    }

    fn output(&self, request: &Request) -> String {
        self.podman.cli(&["logs", request.name]).stdout
    }

    fn exec(&self, request: &Request, args: &[&str]) -> Finished {
        self.podman.cli(&[&["exec", request.name], args].concat())
    }

    fn health(&self, request: &Request) -> String {
        let _ = self.podman.cli(&["healthcheck", "run", request.name]);
        let log = self.podman.inspect(request.name, "json .State.Health.Log");
        let log: Value = serde_json::from_str(&log).expect("JSON");
        log[0]["Output"].as_str().unwrap_or_default().to_owned()
    }

    fn stop(&self, request: &Request) {
        self.podman.done(&["stop", "-t0", request.name]);
    }

    fn remove(&self, request: &Request) {
        // A container that could not be started may already be gone.
        let _ = self.podman.cli(&["rm", "-f", "-t0", request.name]);
    }

    fn config(&self, request: &Request) -> Value {
        let path = self.podman.inspect(request.name, ".OCIConfigPath");
        serde_json::from_slice(&std::fs::read(path).expect("config.json")).expect("JSON")
    }
}
