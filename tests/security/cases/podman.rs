//! The stage of root's Podman with sublet's hook and separate storage.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use sublet_e2e::podman::Podman;
use sublet_e2e::{Finished, World, bin_dir, programs};

use super::frame::{NEIGHBOUR, Seen, Stage};

/// Prints the device nodes, and then what CUDA sees.
pub const PROBE: &str = "echo nodes: $(ls /dev | grep nvidia)\nexec cuda-probe \"$@\"\n";

/// The functions of every engine's entry point.
pub const SHELL: &str = r#"said() { for i in {1..100}; do podman logs c 2>/dev/null | grep -q '"event":"info"' && break; sleep 0.05; done; podman logs c; }
leases() { sublet lease list --format json | grep -c container_id; }
swap() { local t; t=$(<"$3"); [[ $t == *"$1"* ]] && printf %s "${t/"$1"/"$2"}" >"$3"; }
aside() { mv "$1" "$1.aside"; }
daemons() { for p in /proc/[0-9]*; do [[ $(cat $p/comm 2>/dev/null) == nvidia-cuda-mps* ]] && grep -qz "$DIR" $p/environ 2>/dev/null && echo "${p#/proc/}"; done; }
end_daemons() { kill -9 $(daemons) 2>/dev/null; while [ -n "$(daemons)" ]; do sleep 0.01; done; }
stop_daemons() { local p; for p in $(daemons); do kill -STOP $p; until grep -q '^State:.T' /proc/$p/status; do sleep 0.01; done; done; }"#;

const PRELUDE: &str = r#"`podman` is Podman with a storage, hooks (`$HOOKS`) and the image `probe` of this world's own; `$DIR` has all: sublet's
`$STATE` and `$CONFIG`, and the driver `$DRIVER`. `probe info` prints the nodes it sees, then what CUDA has, and `probe hold`
holds on to that. A neighbour with the same share runs beside it all the time.

```sh
share='--annotation sublet.sm=25 --annotation sublet.memory=8GiB'
up() { podman run --rm --name c $share "$@" probe probe info; }
long() { podman run -d --name c "$@" probe sh -c 'while :; do sleep 1; done' >/dev/null; }
imaged() { : >$STATE/no-checkpoint.conf; long $share && podman container checkpoint "$@" c >/dev/null; sublet refresh >/dev/null; }
fake() { local clock=$1; shift; faketime -m -f "$clock" "$@"; }
hooked() { local lib; lib=$(echo /usr/lib/*/faketime/libfaketimeMT.so.1); printf '#!/bin/bash\necho "%s" >/etc/faketimerc\nexec > >(sed "s#\\"createRuntime\\"\\],\\"env\\":\\[#&\\"LD_PRELOAD=%s\\",#"; echo "%s" >/etc/faketimerc)\nLD_PRELOAD=%s exec %s "$@"\n' "$1" $lib "$2" $lib "$(command -v sublet-hook)" >hook; chmod 755 hook; sed -i "s|\"path\": *\"[^\"]*\"|\"path\":\"$PWD/hook\"|" $HOOKS/sublet.json; }
hold() { podman run -d --name c $share "$@" probe probe hold 60 >/dev/null; }
rest() { podman run -d --name c $share "$@" probe sleep 60 >/dev/null; }
import() { tar -C $1 -cf $1.tar . && podman import -q $1.tar made >/dev/null; }
plain() { podman run --rm --name c "$@" probe probe info; [ $? = 10 ]; }
SHELL
export -f said leases swap aside daemons end_daemons stop_daemons up hold rest import plain; export share
```"#;

/// One GPU, and a neighbour on it that got its share from the hook.
struct Stand {
    podman: Podman,
    id: String,
    prelude: String,
}

pub fn stand() -> Box<dyn Stage> {
    let world = World::simulated("h200", "");
    let dir = world.dir.path().to_owned();
    // The root user of a container with a user namespace must be able to pass through this directory.
    std::fs::set_permissions(&dir, Permissions::from_mode(0o711)).expect("chmod");
    programs::script(&dir.join("rootfs/usr/bin/probe"), PROBE);
    let podman = Podman::up(world);
    let command = podman.command();
    let words: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect();
    programs::script(&dir.join("bin/podman"), &format!("exec /usr/bin/podman {} \"$@\"\n", words.join(" ")));
    let share = ["sublet.sm=25", "sublet.memory=8GiB"];
    let started = podman.run(NEIGHBOUR, &share, &[], &["sleep", "3600"]);
    assert!(started.ok, "{started:?}");
    Box::new(Stand { id: started.stdout.trim().to_owned(), prelude: PRELUDE.replace("SHELL", SHELL), podman })
}

impl Stand {
    fn file(&self, name: &str) -> PathBuf {
        self.podman.world.dir.path().join(name)
    }
}

impl Stage for Stand {
    fn world(&self) -> &World {
        &self.podman.world
    }

    fn prelude(&self) -> &str {
        &self.prelude
    }

    fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        let path = std::env::var("PATH").expect("PATH");
        let world = &self.podman.world;
        let ours = format!("{}:{}:{path}", self.file("bin").display(), bin_dir().display());
        vec![
            ("DIR", self.file("")),
            ("HOOKS", self.file("hooks")),
            ("STATE", world.state_dir()),
            ("CONFIG", world.config.clone()),
            ("SUBLET_CONFIG", world.config.clone()),
            ("CONTAINERS_CONF", self.file("containers.conf")),
            ("PODMAN_IGNORE_CGROUPSV1_WARNING", "1".into()),
            ("DRIVER", world.driver_root.clone().expect("a simulated driver")),
            ("PATH", ours.into()),
        ]
    }

    fn before(&self) {
        for name in ["scratch", "hooks"] {
            let _ = std::fs::remove_dir_all(self.file(name));
            std::fs::create_dir(self.file(name)).expect("a directory");
        }
        let _ = self.podman.cli(&["rmi", "--force", "made"]);
        std::fs::write(self.file("hooks/sublet.json"), self.podman.hook().to_string()).expect("the hook");
    }

    fn containers(&self) -> Vec<String> {
        let listed = self.podman.cli(&["ps", "--all", "--quiet", "--no-trunc"]);
        listed.stdout.lines().map(str::to_owned).collect()
    }

    fn remove(&self, id: &str) -> Result<(), String> {
        // If conmon is gone, the first try only finds that out.
        let _ = self.podman.cli(&["rm", "--force", "--time=0", id]);
        let removed = self.podman.cli(&["rm", "--force", "--time=0", id]);
        if removed.ok {
            return Ok(());
        }
        // A pod's infra container is removed with its pod.
        let pods = self.podman.cli(&["pod", "rm", "--all", "--force", "--time=0"]);
        if pods.ok && !self.containers().iter().any(|left| left == id) {
            return Ok(());
        }
        Err(format!("rm --force: {}", removed.stderr.trim()))
    }

    fn neighbour(&self) -> Seen {
        seen(self.podman.cli(&["exec", NEIGHBOUR, "probe", "info"]))
    }

    fn neighbour_id(&self) -> String {
        self.id.clone()
    }

    fn cgroups(&self) -> String {
        "libpod-".to_owned()
    }

    fn neighbour_cgroup(&self) -> String {
        format!("libpod-{}", self.id)
    }
}

pub fn seen(finished: Finished) -> Seen {
    Seen { code: finished.code, stdout: finished.stdout, stderr: finished.stderr }
}
