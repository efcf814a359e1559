//! `sublet-hook prestart`: gives a container its share that a real low-level runtime has made. The runtime calls a hook of
//! the test's own, which waits; meanwhile sublet's hook is run and followed, and then the other one ends as it did.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::libc;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};
use sublet_e2e::killing::mount_points;
use sublet_e2e::{Bundle, Finished, eventually};

use crate::injector::{self, Fault, Key, Seen};
use crate::scene::{Host, SHARE, SHARE_PROGRAM, difference};
use crate::sweep::Path;
use crate::table::Table;

pub struct Prestart {
    host: Host,
    /// The books without the container.
    before: Value,
    /// What the container of the undisturbed run has.
    expected: Option<Value>,
    /// The runtime whose hook waits, and the pipe from which that reads its exit code.
    creating: Option<(Child, File)>,
}

impl Prestart {
    pub fn new() -> Self {
        let mut host = Host::real("h200", "");
        host.files.stdin = host.users.world.dir.path().join("stdin");
        assert!(host.sublet(&["gc"]).ok);
        let before = host.books().expect("a ledger");
        let path = Self { host, before, expected: None, creating: None };
        mkfifo(&path.answer(), Mode::S_IRWXU).expect("a pipe");
        path
    }

    /// The pipe by which the waiting hook is told its exit code.
    fn answer(&self) -> PathBuf {
        self.host.users.world.dir.path().join("answer")
    }

    /// A plain bundle whose hook is sublet's.
    fn hooked(&self) -> Bundle<'_> {
        let mut bundle = self.host.users.world.bundle("victim", SHARE, &["/bin/sleep", "600"]);
        bundle.hook(&["prestart", "poststop"]);
        bundle
    }

    /// The same with a hook that waits.
    fn bundle(&self) -> Bundle<'_> {
        let mut bundle = self.hooked();
        let (state, answer) = (self.host.files.stdin.display(), self.answer());
        let script = format!("cat >{state} && read -r code <{} && exit $code", answer.display());
        let hook = json!([{"path": "/bin/sh", "args": ["sh", "-c", script], "env": ["PATH=/usr/bin:/bin"]}]);
        bundle.spec["hooks"]["prestart"] = hook;
        bundle
    }

    fn create(bundle: &Bundle<'_>) -> Command {
        bundle.write();
        let mut command = bundle.runtime();
        command.args(["create", "--bundle"]).arg(&bundle.dir).arg(&bundle.id);
        let open = |name| File::create(bundle.world().dir.path().join(name)).expect("a file for its output");
        command.stdin(Stdio::null()).stdout(open("created")).stderr(open("created-err"));
        command
    }

    /// Lets the waiting hook end with `code`; whether the container was then created.
    fn go_on(&mut self, code: u8) -> Result<bool, String> {
        let (mut creating, mut pipe) = self.creating.take().ok_or("nothing waits")?;
        writeln!(pipe, "{code}").map_err(|error| error.to_string())?;
        drop(pipe);
        creating.wait().map(|status| status.success()).map_err(|error| error.to_string())
    }

    fn delete(&self) -> Result<(), String> {
        let deleted = self.host.undisturbed(self.hooked().runtime().args(["delete", "--force", "victim"]));
        if deleted.ok { Ok(()) } else { Err(format!("delete fails: {deleted:?}")) }
    }

    fn is_as_before(&self) -> Result<(), String> {
        // What was killed is in its cgroup for a moment.
        let gone =
            || self.host.collect().is_ok() && self.host.books().is_ok_and(|books| books == self.before);
        if !eventually(gone) {
            return Err(format!(
                "no container exists, and in the ledger {}",
                difference(&self.host.books()?, &self.before)
            ));
        }
        let bundle = self.hooked();
        self.host.daemons(0)?;
        self.host.tidy(Some(&bundle))?;
        let left = mount_points(&bundle.dir);
        if !left.is_empty() {
            return Err(format!("mount points are left in the root filesystem: {left}"));
        }
        let mounts = fs::read_to_string("/proc/self/mounts").map_err(|error| error.to_string())?;
        let driver = self.host.users.world.driver_root.as_ref().map(|root| root.display().to_string());
        let left = |line: &&str| driver.as_ref().is_some_and(|root| line.contains(root));
        if let Some(line) = mounts.lines().find(left) {
            return Err(format!("a mount is left: {line}"));
        }
        // What is made once in a root filesystem is made by each run.
        fs::remove_dir_all(bundle.dir.join("rootfs")).map_err(|error| error.to_string())
    }

    /// The container that exists has its whole share.
    fn is_right(&mut self) -> Result<(), String> {
        let bundle = self.hooked();
        let pid = bundle.pid();
        let leases = self.host.ledger()?["leases"].take();
        let bound = leases.as_array().is_some_and(|leases| {
            leases.len() == 1 && leases[0]["state"] == "active" && leases[0]["init"]["process"]["pid"] == pid
        });
        if !bound {
            return Err(format!(
                "the container exists, and its lease is not bound to process {pid}: {leases}"
            ));
        }
        // A server of its own is named after the lease.
        let mut books = self.host.books()?;
        (books["leases"][0]["daemon"], books["daemons"][0]["key"]) = (Value::Null, Value::Null);
        let share =
            json!({"sees": sees(&bundle)?, "mounts": mounts(pid), "nodes": nodes(pid), "books": books});
        let expected = self.expected.get_or_insert_with(|| share.clone());
        if share == *expected {
            Ok(())
        } else {
            Err(format!("in the container {}", difference(&share, expected)))
        }
    }

    /// The engine tries again, and the container ends.
    fn again(&mut self) -> Result<(), String> {
        let status = Self::create(&self.hooked()).status().map_err(|error| error.to_string())?;
        if !status.success() {
            return Err(format!("the next create fails: {}", self.said_by_runtime()));
        }
        self.is_right()?;
        self.delete()?;
        self.is_as_before()
    }

    fn said_by_runtime(&self) -> String {
        fs::read_to_string(self.host.users.world.dir.path().join("created-err")).unwrap_or_default()
    }
}

/// What CUDA sees of its share.
fn sees(bundle: &Bundle<'_>) -> Result<Value, String> {
    let done: Finished = bundle.exec(&["/usr/bin/cuda-probe", "info"]);
    let mut seen = done.json().into_iter().next().ok_or_else(|| format!("CUDA answers nothing: {done:?}"))?;
    if !seen["error"].is_null() {
        return Err(format!("CUDA fails: {seen}"));
    }
    if let Some(seen) = seen.as_object_mut() {
        seen.retain(|key, _| ["count", "mps", "sm", "free_mib"].contains(&key.as_str()));
    }
    Ok(seen)
}

/// Where something is mounted for process `pid`, and how (proc(5), mountinfo).
fn mounts(pid: i32) -> BTreeSet<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    let fields = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let places = fields.filter(|fields| fields.get(4).is_some_and(|place| *place != SHARE_PROGRAM));
    places.filter_map(|fields| Some(format!("{} {}", fields.get(4)?, fields.get(5)?))).collect()
}

/// The names in /dev of process `pid`.
fn nodes(pid: i32) -> Vec<String> {
    crate::scene::names(&PathBuf::from(format!("/proc/{pid}/root/dev")))
}

impl Path for Prestart {
    fn prepare(&mut self) -> Result<(), String> {
        let mut creating = Self::create(&self.bundle()).spawn().map_err(|error| error.to_string())?;
        let mut pipe = None;
        let waits = || {
            // Nobody reads the pipe before the whole state is written.
            let mut open = OpenOptions::new();
            pipe = open.write(true).custom_flags(libc::O_NONBLOCK).open(self.answer()).ok();
            pipe.is_some() || creating.try_wait().is_ok_and(|ended| ended.is_some())
        };
        eventually(waits);
        let Some(pipe) = pipe else {
            let _ = creating.kill();
            let _ = creating.wait();
            return Err(format!("the runtime does not come to its hook: {}", self.said_by_runtime()));
        };
        self.creating = Some((creating, pipe));
        self.host.forget_output();
        Ok(())
    }

    fn run(&mut self, table: &Table, wanted: Option<(&Key, Fault)>) -> Seen {
        let mut hook = self.host.users.world.command("sublet-hook");
        hook.arg("prestart");
        injector::run(table, &hook, &self.host.files, wanted)
    }

    fn judge(&mut self, seen: &Seen, fault: Option<Fault>) -> Result<(), String> {
        let ok = seen.code == Some(0);
        let created = self.go_on(u8::from(!ok))?;
        self.host.ended_well(seen, fault)?;
        if fault.is_none() && !ok {
            return Err(format!("it fails: {}", self.host.said()));
        }
        if created != ok {
            return Err(format!("the hook's code is {:?}: {}", seen.code, self.said_by_runtime()));
        }
        if ok {
            self.is_right()?;
        }
        self.delete()?;
        self.is_as_before()?;
        self.again()
    }

    fn renew(&mut self) {
        *self = Self::new();
    }
}

impl Drop for Prestart {
    fn drop(&mut self) {
        if let Some((mut creating, _)) = self.creating.take() {
            let _ = creating.kill();
            let _ = creating.wait();
        }
        let _ = self.delete();
    }
}
