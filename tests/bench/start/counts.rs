//! What a container's life takes, counted by strace(1) and getrusage(2). A busy machine does not change it.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use sublet_e2e::{Bundle, eventually};

use crate::scene::{Build, HIGHER, ID, Scene, TIME_SLICE, WARM, create};

/// Calls of which the mean of the page faults is taken.
const REPEATED: i64 = 20;

/// Where programs are looked up. On a longer one there is more to look at.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Of a process and of the processes that it makes, until they become another program.
const STRACE: &str = "strace -f -b execve -s 300 -e signal=none -o";

/// What one command did, and the `sublet` commands that it started, until it became the low-level runtime or ended.
/// (`sublet serve` does nothing for it, because it does not run.)
#[derive(Default)]
struct Counts {
    calls: usize,
    /// Of the ledger or its copy.
    replaced: usize,
    /// Programs that it started: sublet's, the driver's; for `delete` of a live container, the low-level runtime.
    programs: usize,
}

/// Prints both tables.
pub fn print(scene: &Scene) -> Result<()> {
    println!(
        "| command | system calls | files of the ledger replaced | programs started |\n|---|---|---|---|"
    );
    let counted = Counted::new(scene)?;
    let plain = scene.bundle("plain", &[]);
    let call = |arguments: &[&str]| scene.shim(&counted.build, arguments);
    counted.row("`--version`", &call(&["--version"])?)?;
    counted.row("`state`", &call(&["state", ID])?)?;
    plain.write();
    counted.row("`create`, no annotation", &call(&create(&plain))?)?;
    counted.life("time-slice", TIME_SLICE)?;
    let holder = scene.holder();
    counted.life("MPS, daemon warm", WARM)?;
    counted.row("`exec`, MPS, daemon warm", &counted.real(&["exec", &holder.id, "/bin/true"])?)?;
    counted.life("MPS, the ceiling rises and falls", HIGHER)?;
    let shared = scene.bundle("faults", WARM);
    println!("\n| command | page faults more than `/bin/true` |\n|---|---|");
    faults(scene, "`state`", None, &["state", ID])?;
    faults(scene, "`create`, no annotation", Some(&plain), &create(&plain))?;
    faults(scene, "`create`, MPS, daemon warm", Some(&shared), &create(&shared))?;
    holder.down();
    Ok(())
}

/// The programs in a directory in which `sublet` is a script that has it traced.
struct Counted<'s> {
    scene: &'s Scene,
    build: Build,
    /// What `sublet` commands did, a file each.
    traces: PathBuf,
}

impl<'s> Counted<'s> {
    fn new(scene: &'s Scene) -> Result<Self> {
        let directory = scene.world.dir.path().join("counted");
        let traces = directory.join("traces");
        fs::create_dir_all(&traces)?;
        let programs = &scene.builds[0].directory;
        for program in ["sublet-runtime", "sublet-share"] {
            fs::copy(programs.join(program), directory.join(program)).context(program)?;
        }
        std::os::unix::fs::symlink("sublet-runtime", directory.join("sublet-hook"))?;
        let (sublet, to) = (programs.join("sublet"), traces.display());
        let script = format!("#!/bin/sh\nexec {STRACE} {to}/$$ -- {} \"$@\"\n", sublet.display());
        fs::write(directory.join("sublet"), script)?;
        fs::set_permissions(directory.join("sublet"), Permissions::from_mode(0o755))?;
        Ok(Self { scene, build: Build { name: "", directory }, traces })
    }

    fn life(&self, share: &str, annotations: &[(&str, &str)]) -> Result<()> {
        let bundle = self.scene.bundle("life", annotations);
        bundle.write();
        let pid_file = bundle.dir.join("pid");
        let (pid_text, dir) =
            (pid_file.to_string_lossy().into_owned(), bundle.dir.to_string_lossy().into_owned());
        let create = ["create", "--bundle", &dir, "--pid-file", &pid_text, &bundle.id];
        self.row(&format!("`create`, {share}"), &self.real(&create)?)?;
        self.row(&format!("`start`, {share}"), &self.real(&["start", &bundle.id])?)?;
        let pid = fs::read_to_string(&pid_file)?;
        ensure!(eventually(|| has_ended(pid.trim())), "it does not end");
        self.row(&format!("`delete`, {share}"), &self.real(&["delete", &bundle.id])?)?;
        bundle.write();
        self.row(&format!("`run`, {share}"), &self.real(&["run", "--bundle", &dir, &bundle.id])?)?;
        fs::remove_dir_all(&bundle.dir)?;
        Ok(())
    }

    /// A call with the low-level runtime.
    fn real(&self, arguments: &[&str]) -> Result<Command> {
        let world = &self.scene.world;
        let mut command = Command::new(self.build.directory.join("sublet-runtime"));
        command.arg("--root").arg(world.runtime_root()).args(arguments);
        command.env("SUBLET_CONFIG", &world.config);
        self.scene.quiet(&mut command)
    }

    fn row(&self, what: &str, command: &Command) -> Result<()> {
        let file = self.scene.world.dir.path().join("trace");
        let mut strace = STRACE.split(' ');
        let mut traced = Command::new(strace.next().unwrap_or_default());
        traced.args(strace).arg(&file).arg("--").arg(command.get_program()).args(command.get_args());
        traced.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        traced.env("PATH", PATH);
        self.scene.timed(self.scene.quiet(&mut traced)?)?;
        let mut trace = fs::read_to_string(&file)?;
        // What was started and not waited for goes on for a moment. A hook of the low-level runtime's may start more.
        let started = trace.lines().filter_map(|line| started_sublet(line, &trace)).collect::<BTreeSet<_>>();
        let ended = || started.iter().map(|pid| self.ended(pid)).collect::<Option<String>>();
        ensure!(eventually(|| ended().is_some()), "{what}: {} commands", started.len());
        let ended = ended().unwrap_or_default();
        trace += &ended;
        if let Some(kept) = std::env::var_os("KEEP_TRACES") {
            fs::write(Path::new(&kept).join(what.replace([' ', '`', ','], "_")), &trace)?;
        }
        fs::remove_dir_all(&self.traces)?;
        fs::create_dir(&self.traces)?;
        ensure!(!trace.contains("io_uring_setup("), "what is done by io_uring is not seen");
        let counts = count(&trace);
        println!("| {what} | {} | {} | {} |", counts.calls, counts.replaced, counts.programs);
        Ok(())
    }

    /// The trace of the `sublet` command that was process `pid`, if it has ended.
    fn ended(&self, pid: &str) -> Option<String> {
        fs::read_to_string(self.traces.join(pid)).ok().filter(|trace| trace.ends_with(" +++\n"))
    }
}

/// What strace writes when a process becomes another program.
const DETACHED: &str = "<detached ";

/// The process that becomes `sublet` by this line of `trace`. On a busy machine strace leaves the call unfinished, also where
/// it succeeds; one that fails is resumed.
fn started_sublet<'t>(line: &'t str, trace: &str) -> Option<&'t str> {
    let (pid, call) = line.split_once(' ').filter(|(_, call)| call.contains("/sublet\""))?;
    let fails = |line: &str| {
        line.split_once(' ').is_some_and(|(other, call)| {
            other == pid && call.contains("execve resumed>") && !call.contains(DETACHED)
        })
    };
    let starts = call.trim_start().starts_with("execve(")
        && (call.contains(DETACHED) || call.contains("<unfinished") && !trace.lines().any(fails));
    starts.then_some(pid)
}

/// `trace` is what [`STRACE`] writes: lines of `PID CALL(…) = RESULT`.
fn count(trace: &str) -> Counts {
    let mut counts = Counts::default();
    // Not the rest of a call whose beginning was counted, nor the end of a process.
    let calls = trace.lines().filter_map(|line| Some(line.split_once(' ')?.1.trim_start()));
    for call in calls.filter(|call| !call.starts_with(['<', '+']) && !call.contains(DETACHED)) {
        counts.calls += 1;
        counts.programs +=
            usize::from(["clone(", "clone3(", "vfork(", "fork("].iter().any(|make| call.starts_with(make)));
        let to = call.strip_prefix("rename(").and_then(|names| names.split('"').nth(3)).unwrap_or_default();
        counts.replaced += usize::from(to.ends_with("/ledger.json") || to.ends_with("/ledger.json.copy"));
    }
    counts
}

fn faults(scene: &Scene, what: &str, bundle: Option<&Bundle<'_>>, arguments: &[&str]) -> Result<()> {
    let mut total = 0;
    for _ in 0..REPEATED {
        scene.collect()?;
        if let Some(bundle) = bundle {
            bundle.write();
        }
        let own = page_faults(scene, scene.shim(&scene.builds[0], arguments)?)?;
        total += own - page_faults(scene, scene.quiet(&mut Command::new("/bin/true"))?)?;
    }
    println!("| {what} | {} |", total / REPEATED);
    Ok(())
}

fn page_faults(scene: &Scene, command: Command) -> Result<i64> {
    let so_far = || getrusage(UsageWho::RUSAGE_CHILDREN).map(|usage| usage.minor_page_faults());
    let before = so_far()?;
    scene.timed(command)?;
    Ok(so_far()? - before)
}

/// A process that was not waited for yet has ended too.
pub fn has_ended(pid: &str) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.starts_with(" Z"))
}
