//! `sublet doctor`: checks what keeps containers on this host from their shares.

use crate::probe;
use std::process::{Command, ExitCode};
use std::time::Duration;
use sublet_core::config_files;

use schemars::JsonSchema;
use serde::Serialize;

use super::doctor_run::{self, Engine};
use super::tables::{self, Format};
use crate::doctor::{self, Check, Host, Verdict};
use crate::shown::word;
use sublet_core::inventory::Inventory;
use sublet_core::parse_errors::plain;
use sublet_core::process::child::{self, ChildError};
use sublet_core::process::sublet::PATH;

/// A program, such as an engine's, that does not answer within this time is given up.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A sleeping driver is woken within seconds; one that hangs does not answer at all.
const NVML_LIMIT: Duration = Duration::from_secs(60);

/// In bytes: more than the inventory of 16 GPUs full of processes takes.
const LONGEST: usize = 8 << 20;

/// Arguments of `sublet doctor`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Read files only: takes under a second, and asks neither NVML, nor engines, nor processes
    #[arg(long)]
    quick: bool,
    /// Run a test container instead, which reports what it got; needs no image and no network
    #[arg(long, value_enum, value_name = "ENGINE", conflicts_with = "quick")]
    run: Option<Engine>,
    /// An annotation of the test container; default: sublet.sm=25 and sublet.memory=2GiB
    #[arg(long = "annotation", value_parser = super::annotation, value_name = "KEY=VALUE", requires = "run")]
    annotations: Vec<(String, String)>,
    /// Print what NVML reports; another `sublet doctor` calls this
    #[arg(long, hide = true, conflicts_with_all = ["quick", "run"])]
    inventory: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What is printed as JSON.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Doctor")]
pub struct Document<'a> {
    /// `sublet.doctor/1`.
    schema: &'static str,
    checks: &'a [Check],
}

/// Runs it; it fails where a check does.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let Some(engine) = arguments.run {
        // A limit of each kind, small enough for any GPU.
        let small = [("sublet.sm", "25"), ("sublet.memory", "2GiB")];
        let small = small.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let given = &arguments.annotations;
        return doctor_run::run(engine, if given.is_empty() { &small } else { given }, arguments.format);
    }
    let loaded = config_files::load();
    if arguments.inventory {
        tables::json(&probe::probe(&loaded.unwrap_or_default())?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let fix = "correct it, then run `sublet config check`".to_owned();
    let (result, found, fix) = match &loaded {
        Ok(_) => (Verdict::Pass, "valid".to_owned(), None),
        Err(error) => (Verdict::Fail, error.to_string(), Some(fix)),
    };
    let mut checks = vec![Check { check: "configuration", result, found, fix }];
    let config = loaded.unwrap_or_default();
    checks.extend(doctor::run(&Host::of(&config, arguments.quick, ask, probe)));
    let text = || format!("{}\n\n{}", table(&checks), summary(&checks));
    tables::print(arguments.format, &Document { schema: "sublet.doctor/1", checks: &checks }, text)?;
    let failed = checks.iter().any(|check| check.result == Verdict::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// One line per check, with its fix at the end.
fn table(checks: &[Check]) -> String {
    let row = |check: &Check| {
        let fix = check.fix.as_ref().map(|fix| format!("  -> {fix}")).unwrap_or_default();
        vec![word(&check.result), check.check.to_owned(), format!("{}{fix}", check.found)]
    };
    tables::table(&["RESULT", "CHECK", "FOUND  -> FIX"], checks.iter().map(row).collect())
}

/// How many checks there were, and how they went.
fn summary(checks: &[Check]) -> String {
    let each = [Verdict::Fail, Verdict::Warn, Verdict::Pass, Verdict::Skip].map(|verdict| {
        let count = checks.iter().filter(|check| check.result == verdict).count();
        format!("{count} {}", word(&verdict))
    });
    format!("{} checks: {}", checks.len(), each.join(", "))
}

/// What NVML reports, read in a child process. A child that hangs with the driver is left behind.
fn probe() -> Result<Inventory, String> {
    let mut command = Command::new("/proc/self/exe");
    answered(command.args(["doctor", "--inventory", "--format=json"]), NVML_LIMIT)
}

fn answered(command: &mut Command, limit: Duration) -> Result<Inventory, String> {
    let finished = match child::run_whole(command, limit, LONGEST) {
        Ok(finished) => finished,
        Err(ChildError::Timeout) => return Err(format!("NVML gave no answer in {} s", limit.as_secs())),
        Err(ChildError::Io(error)) => return Err(format!("NVML cannot be asked: {error}")),
    };
    if !finished.status.success() {
        let words = finished.stderr.lines().last().unwrap_or("the process that asks NVML ended");
        return Err(words.strip_prefix("sublet: ").unwrap_or(words).to_owned());
    }
    serde_json::from_str(&finished.stdout)
        .map_err(|error| format!("NVML's answer: {}", plain(&error.to_string(), None)))
}

/// The standard output of a program of this host, if it succeeds.
pub fn ask(argv: &[&str]) -> Option<String> {
    let (program, arguments) = argv.split_first()?;
    let mut command = Command::new(program);
    command.env_clear().env("PATH", PATH).env("LC_ALL", "C.UTF-8").args(arguments);
    for name in ["HOME", "DOCKER_HOST", "XDG_RUNTIME_DIR"] {
        command.envs(std::env::var_os(name).map(|value| (name, value)));
    }
    let finished = child::run(&mut command, "", ANSWER_LIMIT).ok()?;
    finished.status.success().then_some(finished.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_hangs_is_said() {
        let asked =
            |script: &str, limit| answered(Command::new("sh").args(["-c", script]), limit).unwrap_err();
        let brief = Duration::from_millis(200);
        assert_eq!(asked("exec sleep 60", brief), "NVML gave no answer in 0 s");
        let long = Duration::from_secs(10);
        assert_eq!(asked("echo sublet: it is missing >&2; exit 1", long), "it is missing");
        assert!(asked("echo {}", long).starts_with("NVML's answer: missing key"));
    }
}
