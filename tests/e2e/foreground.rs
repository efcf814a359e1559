//! `run` in the foreground, by every entry point, without systemd. crun and runc make themselves the reapers of orphans,
//! and crun waits until it has no child any more, so also for an MPS daemon that was started below it. The call returns
//! when its container has ended, with and without `sublet serve`, and nothing is left.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Stdio};

use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::killing::{end, helpers};
use sublet_e2e::user::Host;
use sublet_e2e::{Bundle, Stopping, World, eventually, is_alive, skip_unless_root, stop};

use crate::hardened::Held;

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "600"];
const INFO: &[&str] = &["/usr/bin/cuda-probe", "info"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];
const SMALL: &str = "[share.small]\nsm = 25\n";

/// A low-level runtime that runs a container in the foreground.
struct Foreground(Child);

impl Foreground {
    /// Starts it, and waits until the container has its share.
    fn start(bundle: &Bundle<'_>) -> Self {
        let run = Self::begin(bundle);
        assert_eq!(bundle.event("info")["mps"], json!(true), "{}", bundle.id);
        run
    }

    fn begin(bundle: &Bundle<'_>) -> Self {
        bundle.write();
        let output = |name: &str| File::create(bundle.dir.join(name)).expect("a file");
        let mut command = bundle.runtime();
        command.arg("run").arg("--bundle").arg(&bundle.dir).arg(&bundle.id);
        command.stdin(Stdio::null()).stdout(output("out")).stderr(output("err"));
        Self(command.spawn().expect("the runtime runs"))
    }

    fn has_returned(&mut self) -> bool {
        self.0.try_wait().expect("it is ours").is_some()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().try_into().expect("a pid"))
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A bundle for each entry point that can run one, when its turn comes: precreate takes the lease.
fn by_each(world: &World) -> impl Iterator<Item = Bundle<'_>> {
    ["shim", "precreate", "prestart", "createRuntime"].into_iter().map(|name| {
        let mut bundle = world.bundle(name, SHARE, HOLD);
        match name {
            "shim" => {}
            "precreate" => bundle.precreate(),
            stage => bundle.hook(&[stage, "poststop"]),
        }
        bundle
    })
}

/// A bundle with a hook at createRuntime.
fn hooked<'a>(world: &'a World, id: &str) -> Bundle<'a> {
    let mut bundle = world.bundle(id, SHARE, HOLD);
    bundle.hook(&["createRuntime", "poststop"]);
    bundle
}

/// crun records a container that it runs in the foreground after its process has begun.
fn kill(bundle: &Bundle<'_>) {
    assert!(eventually(|| bundle.kill("KILL").ok), "{}", bundle.id);
}

fn host(extra: &str) -> Host {
    Host::new("h200", extra, Path::new(env!("CARGO_BIN_EXE_speak")))
}

/// The ledger as it is: a command would free what it finds ended.
fn leases(world: &World) -> Vec<Value> {
    let text = fs::read(world.state_dir().join("ledger.json")).expect("a ledger");
    let mut ledger: Value = serde_json::from_slice(&text).expect("JSON");
    serde_json::from_value(ledger["leases"].take()).expect("leases")
}

fn parent(pid: Pid) -> Pid {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
    Pid::from_raw(parent.unwrap_or(0))
}

fn is_below(mut pid: Pid, above: Pid) -> bool {
    while pid.as_raw() > 1 {
        pid = parent(pid);
        if pid == above {
            return true;
        }
    }
    false
}

/// `sublet mps await` of this world.
fn awaiting(world: &World) -> Vec<Pid> {
    let command = |pid: &Pid| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    helpers(world)
        .into_iter()
        .filter(|pid| command(pid).windows(11).any(|words| words == b"\0mps\0await\0"))
        .collect()
}

#[test]
fn it_returns_when_its_container_has_ended() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for bundle in by_each(&world) {
        let mut run = Foreground::start(&bundle);
        kill(&bundle);
        assert!(eventually(|| run.has_returned()), "{}: it waits", bundle.id);
        assert_eq!(leases(&world), Vec::<Value>::new(), "{}", bundle.id);
        // Who frees the lease ends the daemon: poststop, or the helper.
        assert!(eventually(|| world.daemons().is_empty()), "{}: {:?}", bundle.id, world.daemons());
        assert!(eventually(|| awaiting(&world).is_empty()), "{}: a helper is left", bundle.id);
    }
    world.assert_empty();
}

#[test]
fn with_the_service_no_daemon_is_below_it() {
    if skip_unless_root() {
        return;
    }
    let mut host = host("");
    host.start();
    let world = &host.world;
    for bundle in by_each(world) {
        let mut run = Foreground::start(&bundle);
        let daemons = world.daemon_pids("");
        assert!(!daemons.is_empty() && !daemons.iter().any(|pid| is_below(*pid, run.pid())), "{}", bundle.id);
        assert_eq!(awaiting(world), [], "{}", bundle.id);
        kill(&bundle);
        assert!(eventually(|| run.has_returned()), "{}: it waits", bundle.id);
        assert_eq!(leases(world), Vec::<Value>::new(), "{}", bundle.id);
        world.assert_empty();
    }
}

/// Two containers share the daemon that the first one's hook had started.
#[test]
fn a_daemon_that_another_container_uses_stays() {
    if skip_unless_root() {
        return;
    }
    for serves in [true, false] {
        let mut host = host(SMALL);
        if serves {
            host.start();
        }
        let world = &host.world;
        let log = world.dir.path().join("log");
        let config = fs::read_to_string(&world.config).expect("config.toml");
        let logs = config.replacen("[runtime]\n", &format!("[runtime]\nlog = {log:?}\n"), 1);
        fs::write(&world.config, logs).expect("config.toml");
        world.generate_cdi();
        let mut first = world.bundle("first", &[], HOLD);
        first.inject_cdi();
        let mut run = Foreground::start(&first);
        let daemons = world.daemon_pids("");
        let other = world.bundle("other", &[("sublet.share", "small")], HOLD);
        other.up();
        other.event("info");
        assert_eq!(world.daemon_pids(""), daemons, "the same daemon");
        kill(&first);
        assert!(eventually(|| leases(world).len() == 1), "its lease is held: {:?}", leases(world));
        // Without the service crun waits for the daemon (docs/prestart.md), and it is said.
        let said =
            fs::read_to_string(&log).unwrap_or_default().contains("run `sublet serve`, which then starts");
        assert_eq!(said, !serves);
        assert!(!serves || eventually(|| run.has_returned()), "it waits");
        assert!(daemons.iter().all(|pid| is_alive(*pid)), "it was ended");
        assert_eq!(other.exec(INFO).json()[0]["mps"], json!(true));
        other.down();
        assert!(eventually(|| run.has_returned()), "it waits for nobody");
        world.assert_empty();
    }
}

#[test]
fn where_the_helper_is_killed_the_next_command_ends_it() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = hooked(&world, "killed");
    let mut run = Foreground::start(&bundle);
    assert!(eventually(|| awaiting(&world).len() == 1));
    end(&awaiting(&world));
    kill(&bundle);
    let returned = || {
        assert!(world.sublet(&["gc"]).status.success());
        run.has_returned()
    };
    assert!(eventually(returned), "it waits");
    world.assert_empty();
}

#[test]
fn where_the_service_hangs_the_container_starts() {
    if skip_unless_root() {
        return;
    }
    let mut host = host("");
    host.start();
    let serve = host.serve.as_ref().expect("it runs");
    // Not while it has the ledger's lock: that it would keep.
    let held = Held::ledger(&host.world);
    stop(Pid::from_raw(serve.id().try_into().expect("a pid")));
    drop(held);
    let bundle = hooked(&host.world, "hung");
    let mut run = Foreground::start(&bundle);
    kill(&bundle);
    assert!(eventually(|| run.has_returned()), "it waits");
    assert_eq!(leases(&host.world), Vec::<Value>::new());
}

#[test]
fn where_the_service_is_killed_while_it_starts_the_daemon_the_container_starts() {
    if skip_unless_root() {
        return;
    }
    let mut host = host("");
    let stopping = Stopping::install(&host.world);
    host.start();
    stopping.at("daemon");
    let bundle = hooked(&host.world, "served");
    let mut run = Foreground::begin(&bundle);
    assert!(eventually(|| stopping.has_stopped()), "no daemon is started");
    let mut serve = host.serve.take().expect("it runs");
    serve.kill().expect("SIGKILL");
    serve.wait().expect("reaped");
    stopping.go_on();
    assert_eq!(bundle.event("info")["mps"], json!(true));
    kill(&bundle);
    assert!(eventually(|| run.has_returned()), "it waits");
    host.world.assert_empty();
}
