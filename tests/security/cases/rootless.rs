//! The stage of a user's rootless Podman with sublet's hook, and `sublet serve` as root.

use std::cell::RefCell;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Child;

use sublet_e2e::rootless::Rootless;
use sublet_e2e::{Finished, World, bin_dir, eventually, programs};

use super::frame::{NEIGHBOUR, Seen, Stage};
use super::podman::{PROBE, SHELL, seen};

const POLICY: &str = "[[policy]]\nuser = \"tester\"\nmodes = [\"mps\"]\nsm = 50\nmemory = \"16GiB\"\nleases = 3\n\
                      [[policy]]\nuser = \"1001\"\nleases = 1\n";

const PRELUDE: &str = r#"A user runs the containers; everything else is root's. The user may have 50 %, 16 GiB and three leases; another user one
lease. `podman` is the user's Podman, with a storage, hooks (`$HOOKS`) and the image `probe` of this world's own, `user` and
`other` run a command as one or the other, and `ask` says a line to the service as the user. `$DIR` has all: sublet's
`$STATE` and `$CONFIG`, and the driver `$DRIVER`. A neighbour of the same user's with the same share runs beside it all the time.

```sh
share='--annotation sublet.sm=25 --annotation sublet.memory=8GiB'
as() { setpriv --reuid $1 --regid $1 --clear-groups env -i PATH=$DIR/bin:/usr/bin:/bin SUBLET_CONFIG=$CONFIG DIR=$DIR SUBLET_CASE=1 "${@:2}"; }
user() { as 1000 "$@"; }
other() { as 1001 "$@"; }
ask() { printf '%s\n' "$@" | user speak $STATE/sublet.sock; }
up() { podman run --rm --name c $share "$@" probe probe info; }
hold() { podman run -d --name c $share "$@" probe probe hold 60 >/dev/null; }
rest() { podman run -d --name c $share "$@" probe sleep 60 >/dev/null; }
plain() { podman run --rm --name c "$@" probe probe info; [ $? = 10 ]; }
neighbours() { sublet lease list --format json | grep -o '"id": *"[^"]*' | grep -o '[^"]*$' | head -n1; }
service() { for p in /proc/[0-9]*; do [[ $(tr '\0' ' ' <$p/cmdline) == *'sublet serve ' ]] && grep -qz "$DIR" $p/environ && echo ${p#/proc/}; done; } 2>/dev/null
serve() { (env -u SUBLET_CASE setsid sublet serve >/dev/null 2>&1 </dev/null &); until ask '{"v":1,"do":"status"}' 2>/dev/null | grep -q status; do sleep 0.02; done; }
end_service() { kill -9 $(service); while ask '{"v":1,"do":"status"}' >/dev/null 2>&1; do sleep 0.01; done; }
SHELL
```"#;

/// One GPU, and a neighbour on it that got its share from the hook.
struct Stand {
    /// `sublet serve`. It is dropped before its world.
    serve: RefCell<Child>,
    rootless: Rootless,
    id: String,
    prelude: String,
    hook: String,
}

pub fn stand() -> Box<dyn Stage> {
    let world = World::simulated("h200", POLICY);
    programs::script(&world.dir.path().join("rootfs/usr/bin/probe"), PROBE);
    let rootless = Rootless::new(world);
    let dir = rootless.dir();
    // Users who are mapped to nobody must be able to pass through this directory.
    for below in ["home", "home/xdg"] {
        std::fs::set_permissions(dir.join(below), Permissions::from_mode(0o711)).expect("chmod");
    }
    programs::copy(std::path::Path::new(env!("CARGO_BIN_EXE_speak")), &dir.join("bin/speak"));
    let home = dir.join("home");
    let variables = format!(
        "PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME={0} USER=tester XDG_RUNTIME_DIR={0}/xdg CONTAINERS_CONF={1}/containers.conf",
        home.display(),
        dir.display()
    );
    let command = rootless.podman(&[]);
    let words: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let user = "setpriv --reuid 1000 --regid 1000 --clear-groups";
    let script = format!(
        "cd {}; exec {user} env -i {variables} SUBLET_CASE=1 $MORE /usr/bin/podman {} \"$@\"\n",
        home.display(),
        words.join(" ")
    );
    // The programs that the user can reach are in another directory of this name, in which `podman` is not a wrapper.
    std::fs::create_dir(dir.join("root-bin")).expect("a directory");
    programs::script(&dir.join("root-bin/podman"), &script);
    let serve = RefCell::new(serve(&rootless.world));
    let share = ["sublet.sm=25", "sublet.memory=8GiB"];
    let started = rootless.run(NEIGHBOUR, &[], &share, &["sleep", "3600"]);
    assert!(started.status.success(), "{started:?}");
    let hook = std::fs::read_to_string(dir.join("hooks/sublet.json")).expect("the hook");
    Box::new(Stand {
        id: String::from_utf8_lossy(&started.stdout).trim().to_owned(),
        prelude: PRELUDE.replace("SHELL", SHELL),
        serve,
        rootless,
        hook,
    })
}

fn serve(world: &World) -> Child {
    let child = world.command("sublet").arg("serve").spawn().expect("sublet serve runs");
    assert!(eventually(|| answers(world)), "no service");
    child
}

fn answers(world: &World) -> bool {
    UnixStream::connect(world.state_dir().join("sublet.sock")).is_ok()
}

impl Stand {
    fn file(&self, name: &str) -> PathBuf {
        self.rootless.dir().join(name)
    }

    fn cli(&self, arguments: &[&str]) -> Finished {
        Finished::of(&self.rootless.podman(arguments).output().expect("podman runs"))
    }
}

impl Stage for Stand {
    fn world(&self) -> &World {
        &self.rootless.world
    }

    fn prelude(&self) -> &str {
        &self.prelude
    }

    fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        let path = std::env::var("PATH").expect("PATH");
        let world = &self.rootless.world;
        let ours = format!("{}:{}:{path}", self.file("root-bin").display(), bin_dir().display());
        vec![
            ("DIR", self.rootless.dir()),
            ("HOOKS", self.file("hooks")),
            ("STATE", world.state_dir()),
            ("CONFIG", world.config.clone()),
            ("SUBLET_CONFIG", world.config.clone()),
            ("DRIVER", world.driver_root.clone().expect("a simulated driver")),
            ("PATH", ours.into()),
        ]
    }

    fn before(&self) {
        let scratch = self.file("scratch");
        let _ = std::fs::remove_dir_all(&scratch);
        std::fs::create_dir(&scratch).expect("a directory");
        std::fs::set_permissions(&scratch, Permissions::from_mode(0o777)).expect("chmod");
        let _ = std::fs::remove_dir_all(self.file("hooks"));
        std::fs::create_dir(self.file("hooks")).expect("a directory");
        std::fs::write(self.file("hooks/sublet.json"), &self.hook).expect("the hook");
        let _ = self.cli(&["rmi", "--force", "made"]);
        if !answers(&self.rootless.world) {
            let mut last = self.serve.borrow_mut();
            let _ = last.kill();
            let _ = last.wait();
            *last = serve(&self.rootless.world);
        }
    }

    fn containers(&self) -> Vec<String> {
        let listed = self.cli(&["ps", "--all", "--quiet", "--no-trunc"]);
        listed.stdout.lines().map(str::to_owned).collect()
    }

    fn remove(&self, id: &str) -> Result<(), String> {
        let _ = self.cli(&["rm", "--force", "--time=0", id]);
        let removed = self.cli(&["rm", "--force", "--time=0", id]);
        if removed.ok {
            return Ok(());
        }
        let _ = self.cli(&["pod", "rm", "--all", "--force", "--time=0"]);
        let gone = !self.containers().iter().any(|left| left == id);
        if gone { Ok(()) } else { Err(format!("rm --force: {}", removed.stderr.trim())) }
    }

    fn neighbour(&self) -> Seen {
        seen(self.cli(&["exec", NEIGHBOUR, "probe", "info"]))
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

impl Drop for Stand {
    fn drop(&mut self) {
        let _ = self.serve.borrow_mut().kill();
        let _ = self.serve.borrow_mut().wait();
    }
}
