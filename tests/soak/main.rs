//! Random traffic on the simulated driver by real engines, while everything around it is killed, filled and taken
//! away, and a checker from outside the product that looks every second: README.md here.
//!
//! `soak --engine runc|crun|docker|podman [--seed N] [--minutes M] [--steps N] [--cycles N] [--lanes N] [--only FAULT]
//! [--progress FILE]`,
//! as root, in namespaces of its own: tests/soak/run. Status 1 if anything was found. The same seed gives the same steps.

mod books;
mod checker;
mod engine;
mod engines;
mod machine;
mod plan;
mod saboteur;
mod traffic;
mod weather;

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use sublet_e2e::{World, killing};

use checker::{Checker, IDLE_SECONDS};
use engine::{Engine, Plain};
use engines::{ByDocker, ByPodman};
use saboteur::Saboteur;
use traffic::Actor;
use weather::Weather;

struct Options {
    engine: String,
    seed: u64,
    time: Duration,
    /// Of each lane.
    steps: u64,
    cycles: u64,
    lanes: u64,
    progress: Option<PathBuf>,
    /// The one sort of fault that is taken.
    only: Option<String>,
}

impl Options {
    fn read() -> Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs());
        let mut options = Self {
            engine: String::new(),
            seed: now,
            time: Duration::from_secs(240),
            steps: u64::MAX,
            cycles: u64::MAX,
            lanes: 3,
            progress: None,
            only: None,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let value = words.next().with_context(|| format!("{word} needs a value"))?;
            let number = || value.parse::<u64>().with_context(|| format!("{word} {value}: not a number"));
            match word.as_str() {
                "--engine" => options.engine = value,
                "--seed" => options.seed = number()?,
                "--minutes" => options.time = Duration::from_secs_f64(60.0 * value.parse::<f64>()?),
                "--steps" => options.steps = number()?,
                "--cycles" => options.cycles = number()?,
                "--lanes" => options.lanes = number()?,
                "--only" => options.only = Some(value),
                "--progress" => options.progress = Some(value.into()),
                _ => bail!("{word}: no such option"),
            }
        }
        Ok(options)
    }
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("soak: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let options = Options::read()?;
    ensure!(nix::unistd::geteuid().is_root(), "soak starts containers: run it as root (tests/soak/run)");
    println!("soak: {}, seed {}", options.engine, options.seed);
    let topology = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../soak/gpus.toml");
    let idle = format!("[mps]\nidle = \"{IDLE_SECONDS}s\"\n");
    let world = World::simulated(topology.to_str().context("a path")?, &idle);
    saboteur::mount_state(&world);
    let kept = world.dir.path().to_owned();
    let engine: Box<dyn Engine> = match options.engine.as_str() {
        name @ ("runc" | "crun") => {
            ensure!(world.engine.program() == name, "SUBLET_TEST_ENGINE is {}", world.engine.program());
            Box::new(Plain::new(world))
        }
        "docker" => Box::new(ByDocker::up(world)),
        "podman" => Box::new(ByPodman::up(world)),
        other => bail!("--engine {other}: expected runc, crun, docker or podman"),
    };
    let weather = Weather::new();
    let took = play(&options, engine.as_ref(), &weather);
    let findings = weather.findings();
    if !findings.is_empty() {
        let to = PathBuf::from(format!("target/soak/found-{}-{}", options.engine, options.seed));
        keep(engine.world(), &to, &findings);
        println!("soak: {} ({}): its state is in {}", findings.len(), kept.display(), to.display());
    }
    saboteur::unmount_state(engine.world());
    drop(engine);
    report(&options, &weather, took)?;
    ensure!(findings.is_empty(), "seed {}: {} found", options.seed, findings.len());
    Ok(())
}

/// All of it, from the first step to the check of the end.
fn play(options: &Options, engine: &dyn Engine, weather: &Weather) -> Duration {
    let began = Instant::now();
    let mut checker = Checker::new(engine, weather);
    let mut saboteur = Saboteur::new(engine, weather);
    let lanes = AtomicUsize::new(usize::try_from(options.lanes).unwrap_or(1));
    std::thread::scope(|scope| {
        let actors: Vec<_> = (0..options.lanes)
            .map(|lane| {
                let lanes = &lanes;
                scope.spawn(move || {
                    let mut actor = Actor::new(engine, weather, lane);
                    actor.play(options.seed, options.steps);
                    lanes.fetch_sub(1, Ordering::SeqCst);
                    actor
                })
            })
            .collect();
        let broken = scope.spawn(|| saboteur.play(options.seed, options.only.as_deref()));
        let watched = scope.spawn(|| checker.watch());
        let cycles = || weather.counts.cycles.load(Ordering::Relaxed);
        while began.elapsed() < options.time && cycles() < options.cycles && lanes.load(Ordering::SeqCst) > 0
        {
            std::thread::sleep(Duration::from_millis(50));
        }
        weather.end();
        broken.join().expect("no panic");
        watched.join().expect("no panic");
        for actor in actors {
            actor.join().expect("no panic").end();
        }
    });
    machine::thaw(std::path::Path::new("/sys/fs/cgroup"), "");
    // An engine that was killed may have forgotten a container that runs, whose lease is then rightly held.
    let forgotten = killing::contained(engine.world());
    if !forgotten.is_empty() {
        println!(
            "soak: {} processes of containers that the engine has forgotten are killed",
            forgotten.len()
        );
        killing::end(&forgotten);
    }
    saboteur.end();
    checker.nothing_is_left();
    began.elapsed()
}

/// Keeps what tells of a finding.
fn keep(world: &World, to: &std::path::Path, findings: &[String]) {
    let _ = std::fs::create_dir_all(to);
    let _ = std::fs::write(to.join("findings"), findings.join("\n"));
    let state = world.state_dir();
    for name in ["ledger.json", "inventory.json", "events.jsonl", "refusals.json"] {
        let _ = std::fs::copy(state.join(name), to.join(name));
    }
    let first = world.dir.path().join("first-finding");
    let _ = std::process::Command::new("cp").arg("-a").arg(first).arg(to).status();
    for name in ["serve.log", "sublet.log", "dockerd.log"] {
        let _ = std::fs::copy(world.dir.path().join(name), to.join(name));
    }
}

fn report(options: &Options, weather: &Weather, took: Duration) -> Result<()> {
    let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
    let counts = &weather.counts;
    let line = format!(
        "{} seed {}: {} cycles, {} steps, {} faults, {} looks, {} refusals ({} of them judged), {:.1} minutes, {} found",
        options.engine,
        options.seed,
        of(&counts.cycles),
        of(&counts.steps),
        of(&counts.faults),
        of(&counts.looks),
        of(&counts.refusals),
        of(&counts.judged),
        took.as_secs_f64() / 60.0,
        weather.findings().len()
    );
    println!("soak: {line}");
    if let Some(path) = &options.progress {
        let file = std::fs::File::options().append(true).create(true).open(path);
        writeln!(file.with_context(|| path.display().to_string())?, "{line}")?;
    }
    Ok(())
}
