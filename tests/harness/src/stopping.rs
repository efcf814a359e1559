//! A low-level runtime and an MPS daemon that stop half way, so that an engine can be killed at that point.

use std::path::{Path, PathBuf};

use crate::programs;
use crate::world::World;

/// The stopping points of one world. Nothing stops before [`Stopping::at`].
pub struct Stopping {
    dir: PathBuf,
}

impl Stopping {
    /// Installs a wrapper around the world's runtime, and one around the MPS daemon. When the daemon's wrapper stops,
    /// the lease is recorded and config.json is not edited yet.
    #[must_use]
    pub fn install(world: &World) -> Self {
        let dir = world.dir.path().to_owned();
        let runtime = world.engine.program();
        let program = dir.join(format!("stopping-{runtime}"));
        write(
            &program,
            &format!(
                "for word; do case $word in create|start|delete) break;; esac; done\n\
                 case $(cat {dir}/stop-at 2>/dev/null) in\n\
                 before-$word) stop;;\n\
                 after-$word) {runtime} \"$@\"; status=$?; stop; exit $status;;\n\
                 esac\nexec {runtime} \"$@\"\n",
                dir = dir.display()
            ),
            &dir,
        );
        let text = std::fs::read_to_string(&world.config).expect("config.toml");
        let text = text.replace(&format!("{:?}", [runtime]), &format!("{:?}", [&program]));
        assert!(text.contains("stopping-"), "{text}");
        std::fs::write(&world.config, text).expect("config.toml");
        slow_daemon(&dir, world.driver_root.as_ref().expect("a simulated driver"));
        Self { dir }
    }

    /// The next process stops at `stage`: `daemon`, or `before-` or `after-` followed by create, start or delete.
    pub fn at(&self, stage: &str) {
        // The file may come from a process that reached the last stage while it was being released.
        let _ = std::fs::remove_file(self.dir.join("stopped"));
        std::fs::write(self.dir.join("stop-at"), stage).expect("the stage");
    }

    /// Whether a process has stopped.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.dir.join("stopped").exists()
    }

    /// From now on nothing stops, and a stopped process continues if it still lives.
    pub fn go_on(&self) {
        for name in ["stop-at", "stopped"] {
            std::fs::remove_file(self.dir.join(name)).expect("it was there");
        }
    }
}

/// Moves the control program aside and puts a wrapper in its place.
fn slow_daemon(dir: &Path, driver_root: &Path) {
    let aside = driver_root.join("usr/aside");
    std::fs::create_dir(&aside).expect("a directory");
    let bin = driver_root.join("usr/bin");
    let program = bin.join("nvidia-cuda-mps-control");
    std::fs::rename(&program, aside.join("nvidia-cuda-mps-control")).expect("it was there");
    let script = format!(
        "if [ \"$1\" = -d ] && [ \"$(cat {dir}/stop-at 2>/dev/null)\" = daemon ]; then stop; fi\n\
         exec {aside}/nvidia-cuda-mps-control \"$@\"\n",
        dir = dir.display(),
        aside = aside.display()
    );
    write(&program, &script, dir);
}

fn write(program: &Path, script: &str, dir: &Path) {
    let stop =
        format!("stop() {{ : >{0}/stopped; while [ -e {0}/stop-at ]; do sleep 0.05; done; }}", dir.display());
    programs::script(program, &format!("{stop}\n{script}"));
}
