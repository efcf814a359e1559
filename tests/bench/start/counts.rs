//! What a container's life takes, counted by strace(1) and getrusage(2). A busy machine does not change it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use sublet_e2e::{Bundle, eventually};

use crate::by_hand::in_path;
use crate::scene::{HIGHER, ID, Scene, TIME_SLICE, WARM, create};

/// Calls of which the mean of the page faults is taken.
const REPEATED: i64 = 20;

/// What one process did until it became the low-level runtime, or ended.
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
    let plain = scene.bundle("plain", &[]);
    row(scene, "`--version`", &call(scene, &["--version"])?)?;
    row(scene, "`state`", &call(scene, &["state", ID])?)?;
    plain.write();
    row(scene, "`create`, no annotation", &call(scene, &create(&plain))?)?;
    life(scene, "time-slice", TIME_SLICE)?;
    let holder = scene.holder();
    life(scene, "MPS, daemon warm", WARM)?;
    life(scene, "MPS, the ceiling rises and falls", HIGHER)?;
    let shared = scene.bundle("faults", WARM);
    println!("\n| command | page faults more than `/bin/true` |\n|---|---|");
    faults(scene, "`state`", None, &["state", ID])?;
    faults(scene, "`create`, no annotation", Some(&plain), &create(&plain))?;
    faults(scene, "`create`, MPS, daemon warm", Some(&shared), &create(&shared))?;
    holder.down();
    Ok(())
}

fn life(scene: &Scene, share: &str, annotations: &[(&str, &str)]) -> Result<()> {
    let bundle = scene.bundle("life", annotations);
    bundle.write();
    let pid_file = bundle.dir.join("pid");
    let (pid_text, dir) =
        (pid_file.to_string_lossy().into_owned(), bundle.dir.to_string_lossy().into_owned());
    let create = ["create", "--bundle", &dir, "--pid-file", &pid_text, &bundle.id];
    row(scene, &format!("`create`, {share}"), &real(scene, &create)?)?;
    row(scene, &format!("`start`, {share}"), &real(scene, &["start", &bundle.id])?)?;
    let pid = std::fs::read_to_string(&pid_file)?;
    ensure!(eventually(|| has_ended(pid.trim())), "it does not end");
    row(scene, &format!("`delete`, {share}"), &real(scene, &["delete", &bundle.id])?)?;
    bundle.write();
    row(scene, &format!("`run`, {share}"), &real(scene, &["run", "--bundle", &dir, &bundle.id])?)?;
    std::fs::remove_dir_all(&bundle.dir)?;
    Ok(())
}

fn call(scene: &Scene, arguments: &[&str]) -> Result<Command> {
    scene.shim(&scene.builds[0], arguments)
}

/// A call with the low-level runtime.
fn real(scene: &Scene, arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(scene.builds[0].directory.join("sublet-runtime"));
    command.arg("--root").arg(scene.world.runtime_root()).args(arguments);
    command.env("SUBLET_CONFIG", &scene.world.config);
    scene.quiet(&mut command)
}

fn row(scene: &Scene, what: &str, command: &Command) -> Result<()> {
    let kept =
        std::env::var_os("KEEP_TRACES").map(|dir| Path::new(&dir).join(what.replace([' ', '`', ','], "_")));
    let file = kept.unwrap_or_else(|| scene.world.dir.path().join("trace"));
    let mut traced = Command::new("strace");
    traced.args(["-s", "300", "-e", "signal=none", "-o"]).arg(&file).arg("--");
    traced.arg(command.get_program()).args(command.get_args());
    traced.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    scene.timed(scene.quiet(&mut traced)?)?;
    let runtime = in_path(scene.world.engine.program()).context("no low-level runtime")?;
    let counts = count(&std::fs::read_to_string(&file)?, &runtime);
    println!("| {what} | {} | {} | {} |", counts.calls, counts.replaced, counts.programs);
    Ok(())
}

/// `trace` is what `strace -o` writes of one process: lines of `CALL(…) = RESULT`.
fn count(trace: &str, runtime: &Path) -> Counts {
    let runtimes = [format!("execve(\"{}\"", runtime.display()), "execve(\"/bin/true\"".to_owned()];
    let became = |line: &&str| runtimes.iter().any(|runtime| line.starts_with(runtime.as_str()));
    let mut counts = Counts::default();
    for line in trace.lines().take_while(|line| !became(line)).filter(|line| !line.starts_with("+++")) {
        counts.calls += 1;
        counts.programs +=
            usize::from(["clone(", "clone3(", "vfork(", "fork("].iter().any(|call| line.starts_with(call)));
        let to = line.strip_prefix("rename(").and_then(|names| names.split('"').nth(3)).unwrap_or_default();
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
