//! Plain bundles, started by runc or crun: through the shim, with an edited config.json, or with a hook.

use serde_json::{Value, json};

use super::{Column, EntryPoint, OTHER_NODE, Request, WHOLE, With, other_node};
use crate::bundle::{Bundle, Finished};
use crate::world::{Engine, World};

/// How a bundle gets its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// `sublet-runtime`.
    Shim,
    /// The config.json that `sublet-hook precreate` writes.
    Precreate,
    /// `sublet-hook` at this stage, with config.json unedited.
    Late(&'static str),
}

/// Plain bundles.
pub struct Plain {
    world: World,
    how: How,
}

impl Plain {
    /// Bundles of this world.
    #[must_use]
    pub fn new(world: World, how: How) -> Self {
        Self { world, how }
    }

    /// Switches these bundles to another entry point.
    pub fn go_by(&mut self, how: How) {
        self.how = how;
    }

    fn bundle(&self, request: &Request, args: &[&str]) -> Bundle<'_> {
        let annotations = request.annotations();
        let annotations: Vec<_> =
            annotations.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let mut bundle = self.world.bundle(request.name, &annotations, args);
        bundle.plain = self.how != How::Shim;
        bundle.spec["root"]["path"] = json!(bundle.dir.join("rootfs"));
        // The rule that Podman writes. With the further rules that Docker writes, crun opens every device under
        // systemd.
        let rule = json!({"allow": request.with == With::Privileged, "access": "rwm"});
        bundle.spec["linux"]["resources"]["devices"] = json!([rule]);
        if request.with == With::Node {
            let source = other_node(&self.world);
            let mount =
                json!({"destination": OTHER_NODE, "type": "bind", "source": source, "options": ["bind"]});
            bundle.spec["mounts"].as_array_mut().expect("mounts").push(mount);
        }
        bundle
    }
}

impl EntryPoint for Plain {
    fn column(&self) -> Column {
        let says_why = self.world.engine == Engine::Runc;
        match self.how {
            How::Shim => WHOLE,
            How::Precreate => Column { exec_environment: false, ..WHOLE },
            How::Late(_) => Column { environment: false, exec_environment: false, says_why, ..WHOLE },
        }
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn start(&self, request: &Request, args: &[&str]) -> Result<(), String> {
        let mut bundle = self.bundle(request, args);
        match self.how {
            How::Shim => {}
            How::Precreate => bundle.precreate(),
            How::Late(stage) => bundle.hook(&[stage, "poststop"]),
        }
        let created = bundle.create();
        if !created.ok {
            return Err(created.stderr);
        }
        let started = bundle.start();
        if started.ok { Ok(()) } else { Err(started.stderr) }
    }

    fn output(&self, request: &Request) -> String {
        self.bundle(request, &[]).output()
    }

    fn exec(&self, request: &Request, args: &[&str]) -> Finished {
        let bundle = self.bundle(request, &[]);
        if self.how == How::Shim { bundle.exec(args) } else { bundle.exec_file(args, &IMAGE) }
    }

    fn health(&self, request: &Request) -> String {
        self.bundle(request, &[]).exec_file(&["/usr/bin/cuda-probe", "info"], &IMAGE).stdout
    }

    fn stop(&self, request: &Request) {
        self.bundle(request, &[]).down();
    }

    fn remove(&self, request: &Request) {
        // runc itself forgets a container that it could not create.
        let _ = self.bundle(request, &[]).delete();
    }

    fn config(&self, request: &Request) -> Value {
        self.bundle(request, &[]).config()
    }
}

/// The image's environment, which is all that engines give to processes started by exec.
const IMAGE: [&str; 1] = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"];
