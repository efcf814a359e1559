//! Docker, with a runtime or with a CDI device.

use std::os::unix::fs::symlink;

use serde_json::{Value, json};

use super::{Column, EntryPoint, Request, WHOLE, cdi_column};
use crate::bundle::Finished;
use crate::docker::{Docker, IMAGE};
use crate::world::{World, bin_dir};

/// How `docker run` asks for a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// `--runtime sublet` and annotations.
    Runtime,
    /// `--runtime sublet-<share>`.
    Named,
    /// `--device sublet/share=<share>`, with the low-level runtime only.
    Device,
}

/// Docker as an entry point.
pub struct OfDocker {
    docker: Docker,
    asked: Asked,
}

impl OfDocker {
    /// Starts dockerd, with one runtime per name in `shares` if containers choose their share by runtime.
    #[must_use]
    pub fn up(world: World, asked: Asked, shares: &[&str]) -> Self {
        let settings = match asked {
            Asked::Runtime => json!({}),
            Asked::Named => json!({"runtimes": runtimes(&world, shares)}),
            Asked::Device => {
                world.generate_cdi();
                let program = format!("/usr/bin/{}", world.engine.program());
                json!({"runtimes": {"low": {"path": program}}})
            }
        };
        Self { docker: Docker::up(world, &settings), asked }
    }
}

/// The runtimes: links named after shares, as in docs/docker.md.
fn runtimes(world: &World, shares: &[&str]) -> Value {
    let bin = world.dir.path().join("named");
    std::fs::create_dir_all(&bin).expect("a directory");
    let runtime = |share: &&str| {
        let link = bin.join(format!("sublet-{share}"));
        symlink(bin_dir().join("sublet-runtime"), &link).expect("a link");
        (format!("sublet-{share}"), json!({"path": link}))
    };
    shares.iter().map(runtime).collect::<serde_json::Map<_, _>>().into()
}

impl EntryPoint for OfDocker {
    fn column(&self) -> Column {
        match self.asked {
            Asked::Runtime => WHOLE,
            Asked::Named => Column { annotations: false, ..WHOLE },
            Asked::Device => cdi_column(self.world().engine),
        }
    }

    fn world(&self) -> &World {
        &self.docker.world
    }

    fn start(&self, request: &Request, args: &[&str]) -> Result<(), String> {
        let mut options = request.options();
        match self.asked {
            Asked::Runtime => options.push("--runtime=sublet".into()),
            Asked::Named if request.keys.is_empty() => options.clear(),
            Asked::Device => options = [vec!["--runtime=low".into()], request.device()].concat(),
            Asked::Named => options = vec![format!("--runtime=sublet-{}", request.share())],
        }
        options.extend(request.more_options(&self.docker.world));
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let health = ["--health-cmd=cuda-probe info", "--health-interval=1s"];
        let run = ["run", "-d", "--name", request.name, "--network=none"];
        let finished = self.docker.cli(&[&run, &health[..], &options, &[IMAGE], args].concat());
        if finished.ok { Ok(()) } else { Err(finished.stderr) }
    }

    fn output(&self, request: &Request) -> String {
        self.docker.cli(&["logs", request.name]).stdout
    }

    fn exec(&self, request: &Request, args: &[&str]) -> Finished {
        self.docker.cli(&[&["exec", request.name], args].concat())
    }

    fn health(&self, request: &Request) -> String {
        let log: Value =
            serde_json::from_str(&self.docker.inspect(request.name, "State.Health.Log")).expect("JSON");
        log[0]["Output"].as_str().unwrap_or_default().to_owned()
    }

    fn stop(&self, request: &Request) {
        self.docker.done(&["stop", "-t", "0", request.name]);
    }

    fn remove(&self, request: &Request) {
        self.docker.done(&["rm", "-f", request.name]);
    }

    fn config(&self, request: &Request) -> Value {
        let id = self.docker.inspect(request.name, "Id");
        serde_json::from_str(&self.docker.config(id.trim_matches('"'))).expect("JSON")
    }
}
