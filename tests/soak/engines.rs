//! Docker and Podman, in the Debian of tests/engines/root.

use std::process::Child;
use std::sync::{Mutex, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use sublet_e2e::docker::{self, Docker};
use sublet_e2e::podman::Podman;
use sublet_e2e::{Finished, World};

use crate::engine::{Engine, Harm, Wanted, bounded};
use crate::plan::By;

/// A dockerd with the runtime `sublet`.
pub struct ByDocker {
    docker: Docker,
    /// The dockerds that were started after the first had been killed. Only the last may run.
    later: Mutex<Vec<Child>>,
}

impl ByDocker {
    pub fn up(world: World) -> Self {
        Self { docker: Docker::up(world, &json!({"live-restore": true})), later: Mutex::default() }
    }

    fn cli(&self, name: &str, arguments: &[&str], harm: Harm) -> Finished {
        let mut command = self.docker.command();
        command.args(arguments);
        bounded(command, &self.docker.world, name, harm)
    }
}

impl Engine for ByDocker {
    fn world(&self) -> &World {
        &self.docker.world
    }

    fn parts(&self) -> &'static [&'static str] {
        &["dockerd", "containerd", "containerd-shim", "runc"]
    }

    fn start(&self, wanted: &Wanted<'_>, harm: Harm) -> Finished {
        let annotations: Vec<String> =
            wanted.annotations.iter().map(|(key, value)| format!("--annotation={key}={value}")).collect();
        let mut all = vec!["run", "-d", "--name", wanted.name, "--network=none", "--runtime=sublet"];
        all.extend(annotations.iter().map(String::as_str));
        all.push(docker::IMAGE);
        all.extend(wanted.command);
        let mut done = self.cli(wanted.name, &all, harm);
        done.stdout = done.stdout.trim().to_owned();
        done
    }

    fn stop(&self, name: &str, harm: Harm) -> Finished {
        self.cli(name, &["rm", "-f", name], harm)
    }

    fn exec(&self, name: &str, command: &[&str]) -> Finished {
        self.cli(&format!("{name}.exec"), &[&["exec", name], command].concat(), Harm::None)
    }

    fn recover(&self) {
        let mut later = self.later.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.docker.cli(&["version"]).ok {
            // It may have been killed while it listened, or it is still on its way up.
            for child in later.iter_mut() {
                let _ = child.kill();
                let _ = child.wait();
            }
            let _ = std::fs::remove_file(self.docker.socket().with_file_name("pid"));
            later.push(self.docker.spawn_daemon());
        }
    }
}

impl Drop for ByDocker {
    fn drop(&mut self) {
        for name in self.docker.cli(&["ps", "-aq"]).stdout.split_whitespace() {
            let _ = self.docker.cli(&["rm", "-f", name]);
        }
        for child in self.later.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            let _ = kill(Pid::from_raw(i32::try_from(child.id()).expect("a pid")), Signal::SIGTERM);
            let _ = child.wait();
        }
    }
}

/// Podman as root, with sublet's hook or sublet's runtime.
pub struct ByPodman {
    podman: Podman,
}

impl ByPodman {
    pub fn up(world: World) -> Self {
        Self { podman: Podman::up(world) }
    }

    fn cli(&self, name: &str, arguments: &[&str], harm: Harm) -> Finished {
        let mut command = self.podman.command();
        command.args(arguments);
        bounded(command, &self.podman.world, name, harm)
    }
}

impl Engine for ByPodman {
    fn world(&self) -> &World {
        &self.podman.world
    }

    fn parts(&self) -> &'static [&'static str] {
        match self.podman.world.engine {
            sublet_e2e::Engine::Runc => &["conmon", "podman", "runc"],
            sublet_e2e::Engine::Crun => &["conmon", "podman", "crun"],
        }
    }

    fn start(&self, wanted: &Wanted<'_>, harm: Harm) -> Finished {
        let annotations: Vec<String> =
            wanted.annotations.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let annotations: Vec<&str> = annotations.iter().map(String::as_str).collect();
        let verb: &[&str] =
            if wanted.by == By::Hook { &["run", "-d"] } else { &["--runtime=sublet", "run", "-d"] };
        let all = Podman::arguments(verb, wanted.name, &annotations, &[], wanted.command);
        let mut done = self.cli(wanted.name, &all, harm);
        done.stdout = done.stdout.trim().to_owned();
        done
    }

    fn stop(&self, name: &str, harm: Harm) -> Finished {
        self.cli(name, &["rm", "-f", "-i", "-t0", name], harm)
    }

    fn exec(&self, name: &str, command: &[&str]) -> Finished {
        self.cli(&format!("{name}.exec"), &[&["exec", name], command].concat(), Harm::None)
    }
}
