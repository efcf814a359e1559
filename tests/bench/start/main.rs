//! What sublet adds to a container's start: medians of programs run in turns, as a table, as JSON and as a picture.
//!
//!   bench [ROUNDS]                     with the simulated driver
//!   bench --real [ROUNDS]              on this host's GPU, with its own driver and MPS
//!     --cycles N       rounds of whole containers (40)
//!     --beside DIR     the programs of another build in the same rounds
//!     --serve          while `sublet serve` runs
//!     --no-engines     without `docker run` and `podman run`, which are timed where those engines are installed
//!     --output DIR     start-cost.json and start-cost.svg there
//!   bench --counts     system calls, ledger writes and page faults, which a busy machine does not change; strace's
//!                      logs are kept in the directory `KEEP_TRACES`, if that is set
//!
//! As root; `make bench` builds what it times and runs it. `SUBLET_BIN_DIR` names the built programs; no file of the
//! repository is read with `--real`. Busybox, runc or crun are found by PATH. State is in a directory of its own, no
//! setting of the GPU is changed, and nothing is left behind. It does not judge: machines are noisy, and the limits in
//! the table are for the reader.

mod by_hand;
mod calls;
mod counts;
mod cycles;
mod engines;
mod picture;
mod report;
mod rows;
mod scene;

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use scene::Scene;

const USAGE: &str = "usage: bench [--real] [--cycles N] [--beside DIR] [--serve] [--no-engines] [--output DIR] [ROUNDS] | bench --counts";

/// The command line.
#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
struct Arguments {
    real: bool,
    counts: bool,
    serve: bool,
    no_engines: bool,
    rounds: usize,
    cycles: usize,
    beside: Option<PathBuf>,
    output: Option<PathBuf>,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self> {
        let mut all = Self {
            real: false,
            counts: false,
            serve: false,
            no_engines: false,
            rounds: 200,
            cycles: 40,
            beside: None,
            output: None,
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().context(USAGE);
            match word.as_str() {
                "--real" => all.real = true,
                "--counts" => all.counts = true,
                "--serve" => all.serve = true,
                "--no-engines" => all.no_engines = true,
                "--cycles" => all.cycles = value()?.parse().context(USAGE)?,
                "--beside" => all.beside = Some(PathBuf::from(value()?).canonicalize().context("--beside")?),
                "--output" => all.output = Some(value()?.into()),
                rounds => all.rounds = rounds.parse().context(USAGE)?,
            }
        }
        ensure!(all.rounds > 0 && all.cycles > 0, USAGE);
        Ok(all)
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    ensure!(nix::unistd::geteuid().is_root(), "bench starts containers: run it as root");
    let scene = Scene::new(arguments.real, arguments.beside.clone())?;
    if arguments.counts {
        return counts::print(&scene);
    }
    let service = arguments.serve.then(|| scene.serve()).transpose()?;
    let mut groups = vec![calls::without_daemon(&scene, arguments.rounds)?];
    groups.extend(cycles::without_daemon(&scene, arguments.cycles)?);
    let holder = scene.holder();
    groups.push(calls::with_daemon(&scene, arguments.rounds)?);
    groups.extend(cycles::with_daemon(&scene, arguments.cycles)?);
    holder.down();
    drop(service);
    let facts = report::Facts::of(&scene, &arguments);
    drop(scene);
    report::write(&facts, &groups, arguments.output.as_deref())?;
    if !arguments.no_engines {
        groups.extend(engines::measure(arguments.real, arguments.cycles)?);
        report::write(&facts, &groups, arguments.output.as_deref())?;
    }
    report::print(&facts, &groups);
    Ok(())
}
