//! Breaks things, by the plan's faults, and puts right what an administrator would.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_e2e::{Finished, World, eventually};

use crate::books;
use crate::engine::{Engine, Harm, bounded};
use crate::machine;
use crate::plan::{Fault, Faults, LAYOUTS};
use crate::weather::Weather;

/// How long a process to be killed is looked for.
const LOOKED_FOR: Duration = Duration::from_millis(1500);

/// The saboteur, who is also the administrator: keeps `sublet serve` running.
pub struct Saboteur<'a> {
    engine: &'a dyn Engine,
    weather: &'a Weather,
    serve: Option<Child>,
}

impl<'a> Saboteur<'a> {
    /// Starts the service.
    pub fn new(engine: &'a dyn Engine, weather: &'a Weather) -> Self {
        let mut saboteur = Self { engine, weather, serve: None };
        saboteur.ensure_serve();
        saboteur
    }

    fn world(&self) -> &'a World {
        self.engine.world()
    }

    /// Faults until the end.
    ///
    /// `only`: the one sort of fault to take, by its name in plan.rs.
    pub fn play(&mut self, seed: u64, only: Option<&str>) {
        let wanted = |fault: &Fault| only.is_none_or(|only| format!("{fault:?}").starts_with(only));
        for (wait, fault) in Faults::new(seed, self.engine.parts()).filter(|(_, fault)| wanted(fault)) {
            self.weather.sleep(Duration::from_millis(wait));
            if self.weather.is_over() {
                break;
            }
            self.weather.tell(&format!("{fault:?}"));
            self.commit(fault);
            self.engine.recover();
            self.ensure_serve();
            self.weather.counts.faults.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn commit(&mut self, fault: Fault) {
        match fault {
            Fault::KillServe => {
                let _storm = self.weather.storm();
                if let Some(mut serve) = self.serve.take() {
                    let _ = serve.kill();
                    let _ = serve.wait();
                }
                self.ensure_serve();
            }
            Fault::KillControl(number) => self.kill_daemon("mps-control", number),
            Fault::KillServer(number) => self.kill_daemon("mps-server", number),
            Fault::KillNext(name) => self.kill_next(name),
            Fault::Refresh => self.ask(&["refresh"]),
            Fault::Layout(number) => self.layout(LAYOUTS[number]),
            Fault::FullDisk { ms } => self.full_disk(Duration::from_millis(ms)),
            Fault::Unmounted { ms } => self.unmounted(Duration::from_millis(ms)),
            Fault::Drained { gpu, ms } => {
                let (_storm, gpu) = (self.weather.storm(), books::gpu(gpu));
                let _ = self.sublet(&["drain", &gpu]);
                self.weather.sleep(Duration::from_millis(ms));
                let _ = self.sublet(&["undrain", &gpu]);
            }
            Fault::LedgerLost => {
                let _storm = self.weather.storm();
                let _ = std::fs::remove_file(self.world().state_dir().join("ledger.json"));
                let _ = self.sublet(&["gc"]);
            }
            Fault::Gc => self.ask(&["gc"]),
            Fault::Status => self.ask(&["status"]),
            Fault::StopIdleDaemons => self.stop_idle_daemons(),
        }
    }

    pub fn sublet(&self, arguments: &[&str]) -> Finished {
        let mut command = self.world().command("sublet");
        command.args(arguments);
        bounded(command, self.world(), "administrator", Harm::None)
    }

    /// A command that does not fail while nothing is being broken.
    fn ask(&self, arguments: &[&str]) {
        let began = Instant::now();
        let done = self.sublet(arguments);
        if !done.ok && self.weather.was_calm_since(began) || done.stderr.contains("TOO LATE") {
            self.weather.found(format!("sublet {arguments:?} failed: {}", done.stderr));
        }
    }

    fn kill_daemon(&self, kind: &str, number: usize) {
        let _storm = self.weather.storm();
        let pids = machine::daemons(self.world(), kind);
        if let Some(pid) = pids.get(number % pids.len().max(1)) {
            let _ = kill(*pid, Signal::SIGKILL);
        }
    }

    fn kill_next(&self, name: &str) {
        let _storm = self.weather.storm();
        let spared = self.serve.as_ref().and_then(|serve| i32::try_from(serve.id()).ok()).unwrap_or(0);
        let until = Instant::now() + LOOKED_FOR;
        while Instant::now() < until {
            let found = machine::named(self.world(), name);
            if let Some(pid) = found.into_iter().find(|pid| pid.as_raw() != spared) {
                let _ = kill(pid, Signal::SIGKILL);
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Refused if instances in use are in the way.
    fn layout(&self, instances: &str) {
        let text = format!("[[gpu]]\nmatch = \"4\"\nmig = true\ninstances = [{instances}]\n");
        let file = self.world().dir.path().join("layout.toml");
        std::fs::write(&file, text).expect("a layout file");
        let done = self.sublet(&["mig", "apply", file.to_str().expect("UTF-8")]);
        if done.stderr.contains("TOO LATE") || done.stderr.contains("panicked") {
            self.weather.found(format!("mig apply: {}", done.stderr));
        }
    }

    fn full_disk(&self, time: Duration) {
        let _storm = self.weather.storm();
        let filler = self.world().state_dir().join("filler");
        if let Ok(mut file) = std::fs::File::create(&filler) {
            for size in [1 << 16, 1] {
                while file.write_all(&vec![0; size]).is_ok() {}
            }
        }
        self.weather.sleep(time);
        let _ = std::fs::remove_file(filler);
    }

    /// The state directory's file system is gone for a while, and comes back as it was. Meanwhile containers end, and
    /// none starts: where no daemon runs, only the records of runtimes tell that there was a ledger, and this world's are in
    /// no usual place.
    fn unmounted(&mut self, time: Duration) {
        let _closed = self.weather.doors.write().unwrap_or_else(PoisonError::into_inner);
        let _storm = self.weather.storm();
        let (dir, store) = (self.world().state_dir(), store(self.world()));
        let gone = Command::new("umount").arg("--lazy").arg(&dir).status();
        if !gone.is_ok_and(|status| status.success()) {
            self.weather.found("the state directory cannot be unmounted".into());
            return;
        }
        let _ = self.sublet(&["status"]);
        self.weather.sleep(time);
        // What was written there meanwhile would be another state directory the next time.
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        }
        let back = Command::new("mount").arg("--bind").arg(&store).arg(&dir).status();
        if !back.is_ok_and(|status| status.success()) {
            self.weather.found("the state directory cannot be mounted again".into());
        }
        // Its socket was in the directory that is gone.
        if let Some(mut serve) = self.serve.take() {
            let _ = serve.kill();
            let _ = serve.wait();
        }
        self.ensure_serve();
    }

    fn stop_idle_daemons(&self) {
        let done = self.sublet(&["status", "--format", "json"]);
        let status: serde_json::Value = serde_json::from_str(&done.stdout).unwrap_or_default();
        for daemon in status["mps"].as_array().into_iter().flatten() {
            if daemon["ends_in_seconds"].is_u64() {
                // By now it may serve again.
                let _ = self.sublet(&["mps", "stop", books::text(daemon, "key")]);
            }
        }
    }

    fn ensure_serve(&mut self) {
        let runs = |serve: &mut Child| serve.try_wait().is_ok_and(|status| status.is_none());
        if self.serve.as_mut().is_some_and(runs) {
            return;
        }
        let mut command = self.world().command("sublet");
        let log = std::fs::File::options()
            .append(true)
            .create(true)
            .open(self.world().dir.path().join("serve.log"));
        command.arg("serve").stderr(log.expect("a log"));
        self.serve = command.spawn().ok();
        let socket = self.world().state_dir().join("sublet.sock");
        // On a full disk it does not come up.
        if !eventually(|| UnixStream::connect(&socket).is_ok()) {
            self.weather.found("sublet serve does not answer after its start".into());
        }
    }

    /// Ends the service as systemd does.
    pub fn end(&mut self) {
        let Some(mut serve) = self.serve.take() else { return };
        let _ = kill(Pid::from_raw(i32::try_from(serve.id()).expect("a pid")), Signal::SIGTERM);
        let until = Instant::now() + Duration::from_secs(60);
        while serve.try_wait().is_ok_and(|status| status.is_none()) {
            if Instant::now() > until {
                self.weather.found("sublet serve does not end".into());
                let _ = serve.kill();
                let _ = serve.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Where the state directory's file system is, whether or not it is mounted in its place.
fn store(world: &World) -> PathBuf {
    world.dir.path().join("store")
}

/// Gives the world a small file system of its own for its state directory.
pub fn mount_state(world: &World) {
    let (store, dir) = (store(world), world.state_dir());
    for each in [&store, &dir] {
        std::fs::create_dir_all(each).expect("a mount point");
    }
    let run = |command: &mut Command| assert!(command.status().expect("mount runs").success(), "{command:?}");
    run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m,mode=755", "tmpfs"]).arg(&store));
    run(Command::new("mount").arg("--bind").arg(&store).arg(&dir));
}

/// Takes both away again.
pub fn unmount_state(world: &World) {
    for dir in [world.state_dir(), store(world)] {
        let _ = Command::new("umount").arg("--lazy").arg(dir).status();
    }
}
