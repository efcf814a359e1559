//! `sublet serve`: one request of a user's, and one look of the guard.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use nix::unistd::Pid;
use serde_json::Value;
use sublet_e2e::user::{Bundle, Host as Users};
use sublet_e2e::{Finished, eventually};

use crate::injector::{self, Fault, Key, Seen};
use crate::scene::{Host, SHARE, difference, out_of_memory, without_lease};
use crate::sweep::Path;
use crate::table::Table;

const ALICE: u32 = 1000;
const QUARTER: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];
const POLICY: &str = "[[policy]]\nuser = 1000\nleases = 2\n[guard]\nperiod = \"100ms\"\n";

/// Longer than the guard's period.
const LOOK: Duration = Duration::from_millis(250);

/// What the service does while it is followed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    Request,
    Guard,
}

pub struct Serve {
    work: Work,
    host: Host,
    /// Without the user's container, and with the one that the guard looks at.
    books: Value,
    /// The config.json of the undisturbed request.
    expected: Option<Value>,
    /// The user's bundle, and the config.json that the engine writes there.
    dir: PathBuf,
    spec: Value,
    /// What the user's request came to: its end, and the config.json after it.
    created: Option<(Finished, Value)>,
}

impl Serve {
    pub fn new(work: Work) -> Self {
        let speak = std::env::current_exe().expect("our own path").with_file_name("speak");
        let host = Host::of(Users::new("h200", POLICY, &speak));
        let (dir, spec) = {
            let made = host.users.bundle(ALICE, "victim", QUARTER, &["/bin/sleep", "600"]);
            (made.dir.clone(), made.spec.clone())
        };
        let mut serve = Self { work, host, books: Value::Null, expected: None, dir, spec, created: None };
        serve.start();
        if work == Work::Guard {
            let bundle = serve.host.users.world.bundle("watched", SHARE, &["/bin/sleep", "600"]);
            bundle.write();
            let created = serve.host.undisturbed(&serve.host.create(&bundle));
            assert!(created.ok, "{created:?}");
        }
        serve.host.collect().expect("sublet gc");
        serve.books = serve.leases().expect("a ledger");
        serve
    }

    /// Starts the service, with its words in the file where those of followed programs are.
    fn start(&mut self) {
        let said = fs::File::create(&self.host.files.stderr).expect("a file for its words");
        let mut command = self.host.users.world.command("sublet");
        let child =
            command.arg("serve").env("RUST_BACKTRACE", "0").stderr(said).stdout(Stdio::null()).spawn();
        self.host.users.serve = Some(child.expect("sublet serve runs"));
        let socket = self.host.users.socket();
        assert!(eventually(|| std::os::unix::net::UnixStream::connect(&socket).is_ok()), "no socket");
    }

    /// Daemons may wait for their next lease while the service runs.
    fn leases(&self) -> Result<Value, String> {
        Ok(self.host.books()?["leases"].take())
    }

    fn pid(&self) -> Pid {
        let serve = self.host.users.serve.as_ref().expect("it was started");
        Pid::from_raw(i32::try_from(serve.id()).expect("a pid"))
    }

    fn threads(&self) -> Vec<String> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok()).collect()
    }

    fn lives(&self) -> bool {
        self.threads().iter().any(|name| name.trim() == "guard")
    }

    fn bundle(&self) -> Bundle<'_> {
        let (dir, spec) = (self.dir.clone(), self.spec.clone());
        Bundle { host: &self.host.users, uid: ALICE, id: "victim".to_owned(), dir, spec }
    }

    /// What a request of the user's came to: all of it, or none.
    fn is_whole(&self, created: &Finished, config: &Value) -> Result<(), String> {
        let edited = without_lease(config.clone());
        let expected = self.expected.as_ref().unwrap_or(&edited);
        if created.ok && edited != *expected {
            return Err(format!(
                "it was created from another config.json: {}",
                difference(&edited, expected)
            ));
        }
        if !created.ok && (created.stderr.trim().is_empty() || *config != self.spec) {
            return Err(format!("refused in a wrong way: {created:?}: {}", difference(config, &self.spec)));
        }
        Ok(())
    }
}

impl Path for Serve {
    fn prepare(&mut self) -> Result<(), String> {
        if !self.lives() {
            if let Some(mut serve) = self.host.users.serve.take() {
                let _ = serve.kill();
                let _ = serve.wait();
            }
            self.start();
        }
        Ok(())
    }

    fn run(&mut self, table: &Table, wanted: Option<(&Key, Fault)>) -> Seen {
        let service = self.pid();
        if self.work == Work::Guard {
            let mut seen = injector::serve(table, service, wanted, || std::thread::sleep(LOOK));
            seen.calls.retain(|call| call.key.process == "guard");
            return seen;
        }
        let mut created = None;
        let bundle = self.bundle();
        let mut seen = injector::serve(table, service, wanted, || {
            let done = bundle.create();
            created = Some((done, bundle.config()));
        });
        drop(bundle);
        seen.calls.retain(|call| call.key.process != "guard");
        self.created = created;
        seen
    }

    fn judge(&mut self, seen: &Seen, fault: Option<Fault>) -> Result<(), String> {
        let said = self.host.said();
        if !seen.unknown.is_empty() {
            return Err(format!("system calls that tests/faults/table does not have: {:?}", seen.unknown));
        }
        if seen.timed_out {
            return Err("it does not come to its end".to_owned());
        }
        if said.contains("panicked at") {
            return Err(format!("the service panics: {said}"));
        }
        if fault != Some(Fault::Kill) && !self.lives() && !out_of_memory(&said) {
            return Err(format!("the service has ended, or its guard: {:?}: {said}", self.threads()));
        }
        if let Some((created, config)) = self.created.take() {
            if fault.is_none() && !created.ok {
                return Err(format!("the user gets no share: {created:?}"));
            }
            self.is_whole(&created, &config)?;
            if self.expected.is_none() {
                self.expected = Some(without_lease(config));
            }
        }
        self.prepare()?;
        if self.work == Work::Request {
            let bundle = self.bundle();
            let (created, config) = (bundle.create(), bundle.config());
            self.is_whole(&created, &config)?;
            if !created.ok {
                return Err(format!("the next request is refused: {created:?}"));
            }
        }
        self.host.collect()?;
        let books = self.leases()?;
        if books != self.books {
            return Err(format!("in the ledger {}", difference(&books, &self.books)));
        }
        self.host.tidy(None)
    }

    /// A request takes several processes.
    fn part(&self) -> usize {
        if self.work == Work::Request { 3 } else { 1 }
    }

    fn renew(&mut self) {
        *self = Self::new(self.work);
    }
}
