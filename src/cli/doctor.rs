//! `sublet doctor`: what stands between this host and containers with GPU shares.

use std::process::{Command, ExitCode};
use std::time::Duration;

use serde_json::json;

use super::doctor_run::{self, Engine};
use super::output::{self, Format};
use crate::child;
use crate::config::{self, Config};
use crate::doctor::{self, Check, Host, Verdict};
use crate::own::PATH;

/// An engine that is asked and hangs is not waited for longer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Arguments of `sublet doctor`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Read files alone, in under a second: no NVML, no engine is asked, no process looked at
    #[arg(long)]
    quick: bool,
    /// Instead of looking: run a container that says what it got, without an image or network
    #[arg(long, value_enum, value_name = "ENGINE", conflicts_with = "quick")]
    run: Option<Engine>,
    /// An annotation for that container: KEY=VALUE; sublet.sm=25 where none is given
    #[arg(long = "annotation", value_parser = super::annotation, value_name = "KEY=VALUE", requires = "run")]
    annotations: Vec<(String, String)>,
    /// How to print it
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Runs it; it fails where a check does.
///
/// # Errors
/// The result cannot be printed.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let Some(engine) = arguments.run {
        let quarter = [("sublet.sm".to_owned(), "25".to_owned())];
        let given = &arguments.annotations;
        return doctor_run::run(engine, if given.is_empty() { &quarter } else { given }, arguments.format);
    }
    let loaded = config::load();
    let mut checks = vec![match &loaded {
        Ok(_) => check(Verdict::Pass, "valid".to_owned(), None),
        Err(error) => {
            check(Verdict::Fail, error.to_string(), Some("correct it; `sublet config check`".to_owned()))
        }
    }];
    let config = loaded.unwrap_or_else(|_| Config::default());
    checks.extend(doctor::run(&Host::of(&config, arguments.quick, ask)));
    match arguments.format {
        Format::Json => output::json(&json!({"schema": "sublet.doctor/1", "checks": checks}))?,
        Format::Table => println!("{}", table(&checks)),
    }
    let failed = checks.iter().any(|check| check.result == Verdict::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn check(result: Verdict, found: String, fix: Option<String>) -> Check {
    Check { check: "configuration", result, found, fix }
}

/// A line a check, the fix at its end.
fn table(checks: &[Check]) -> String {
    let row = |check: &Check| {
        let fix = check.fix.as_ref().map(|fix| format!("  -> {fix}")).unwrap_or_default();
        let result = format!("{:?}", check.result).to_uppercase();
        vec![result, check.check.to_owned(), format!("{}{fix}", check.found)]
    };
    output::table(&["RESULT", "CHECK", "FOUND  -> FIX"], checks.iter().map(row).collect())
}

/// What a program of this host says on its standard output, where it succeeds.
fn ask(argv: &[&str]) -> Option<String> {
    let (program, arguments) = argv.split_first()?;
    let mut command = Command::new(program);
    command.env_clear().env("PATH", PATH).env("LC_ALL", "C.UTF-8").args(arguments);
    for name in ["HOME", "DOCKER_HOST", "XDG_RUNTIME_DIR"] {
        command.envs(std::env::var_os(name).map(|value| (name, value)));
    }
    let finished = child::run(&mut command, "", ANSWER_LIMIT).ok()?;
    finished.status.success().then_some(finished.stdout)
}
