//! Whole containers of `/bin/true`: `create`, `start` and `delete`, and `run`.

use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use sublet_e2e::{Bundle, eventually};

use crate::by_hand::{self, Nvidia, in_path};
use crate::counts::has_ended;
use crate::rows::{Group, Row, WARM_UP};
use crate::scene::{HIGHER, Scene, TIME_SLICE, WARM};

/// Between two containers. The kernel is busy with the last one for a while, and runc's own `create` then takes longer.
const PAUSE: Duration = Duration::from_millis(50);

/// One row's container.
struct Life<'a> {
    row: Row,
    program: PathBuf,
    environment: Vec<(&'static str, PathBuf)>,
    bundle: Bundle<'a>,
}

/// Containers on a host whose GPU nobody uses.
pub fn without_daemon(scene: &Scene, rounds: usize) -> Result<[Group; 3]> {
    let edited = by_hand::edited(scene)?;
    let prepared = by_hand::Prepared::of(scene, &edited)?;
    let with = |name: &str, spec: &serde_json::Value| {
        let mut bundle = scene.bundle(name, &[]);
        by_hand::give(&mut bundle, spec);
        bundle
    };
    let nvidia = Nvidia::find(scene)?;
    let lives = |prefix: &str| {
        let name = |name: &str| format!("{prefix}{name}");
        let mut lives = vec![
            bare(scene, scene.bundle(&name("bare"), &[]), "bare"),
            bare(scene, with(&name("hand"), &edited), "sublet's mounts and nodes written in by hand"),
            bare(scene, with(&name("bind"), &prepared.spec), "the same, its libraries by one bind"),
        ];
        lives.extend(shared(scene, &name("slice"), TIME_SLICE, "time-slice", "1.13 x"));
        if let Some(nvidia) = &nvidia {
            lives.push(Life {
                row: Row::new("NVIDIA's runtime in CDI mode", ""),
                program: nvidia.program.clone(),
                environment: vec![("XDG_CONFIG_HOME", nvidia.configuration.clone())],
                bundle: Nvidia::bundle(scene, &name("nvidia")),
            });
        }
        lives
    };
    Ok([
        in_turns(scene, "`create`, `start` and `delete` of `/bin/true`", lives("c-"), rounds, cycle)?,
        in_turns(scene, "`run` of `/bin/true`", lives("r-"), rounds, run)?,
        in_turns(scene, "`--version`", versions(scene), rounds, version)?,
    ])
}

/// Containers while another one keeps the daemon warm.
pub fn with_daemon(scene: &Scene, rounds: usize) -> Result<[Group; 2]> {
    let lives = |prefix: &str| {
        let name = |name: &str| format!("{prefix}{name}");
        let mut lives = vec![bare(scene, scene.bundle(&name("bare"), &[]), "bare")];
        lives.extend(shared(scene, &name("warm"), WARM, "MPS, daemon warm", "1.13 x"));
        lives.extend(shared(scene, &name("higher"), HIGHER, "MPS, the SM ceiling rises and falls", "1.18 x"));
        lives
    };
    Ok([
        in_turns(scene, "`create`, `start` and `delete` of `/bin/true`, MPS", lives("mc-"), rounds, cycle)?,
        in_turns(scene, "`run` of `/bin/true`, MPS", lives("mr-"), rounds, run)?,
    ])
}

fn bare<'a>(scene: &Scene, bundle: Bundle<'a>, what: &str) -> Life<'a> {
    let name = scene.world.engine.program();
    let program = in_path(name).unwrap_or_else(|| name.into());
    Life { row: Row::new(what, ""), program, environment: Vec::new(), bundle }
}

/// The share by each build.
fn shared<'a>(
    scene: &'a Scene,
    name: &str,
    share: &[(&str, &str)],
    what: &str,
    goal: &'static str,
) -> Vec<Life<'a>> {
    let life = |(nth, build): (usize, &crate::scene::Build)| Life {
        row: Row::new(format!("{what}{}", build.name), goal),
        program: build.directory.join("sublet-runtime"),
        environment: vec![("SUBLET_CONFIG", scene.world.config.clone())],
        bundle: scene.bundle(&format!("{name}{nth}-"), share),
    };
    scene.builds.iter().enumerate().map(life).collect()
}

fn versions(scene: &Scene) -> Vec<Life<'_>> {
    let mut lives = vec![bare(scene, scene.bundle("v-bare", &[]), "bare")];
    lives.extend(shared(scene, "v-", &[], "sublet", "+0.35 ms"));
    lives
}

fn in_turns(
    scene: &Scene,
    title: &'static str,
    mut lives: Vec<Life<'_>>,
    rounds: usize,
    measure: fn(&Scene, &Life<'_>) -> Result<Vec<Duration>>,
) -> Result<Group> {
    let count = lives.len();
    for round in 0..rounds + WARM_UP {
        for turn in 0..count {
            // What comes before a row is not always the same either.
            let turn = if round % 2 == 1 { count - 1 - turn } else { turn };
            let life = &mut lives[(round + turn) % count];
            life.bundle.write();
            sleep(PAUSE);
            let times = measure(scene, life)?;
            life.row.times.push(times);
        }
    }
    Ok(Group { title, rows: lives.into_iter().map(|life| life.row).collect() })
}

fn command(scene: &Scene, life: &Life<'_>, arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(&life.program);
    command.arg("--root").arg(scene.world.runtime_root()).args(arguments);
    command.env("SUBLET_CONFIG", &scene.world.config);
    command.envs(life.environment.iter().map(|(name, value)| (name, value)));
    scene.quiet(&mut command)
}

/// The three commands. The wait for the container's own end between them does not count.
fn cycle(scene: &Scene, life: &Life<'_>) -> Result<Vec<Duration>> {
    let bundle = &life.bundle;
    let pid_file = bundle.dir.join("pid");
    let run = |arguments: &[&str]| scene.timed(command(scene, life, arguments)?);
    let pid_file_text = pid_file.to_string_lossy();
    let dir = bundle.dir.to_string_lossy();
    let created = run(&["create", "--bundle", &dir, "--pid-file", &pid_file_text, &bundle.id])?;
    let started = run(&["start", &bundle.id])?;
    let pid = std::fs::read_to_string(&pid_file)?;
    ensure!(eventually(|| has_ended(pid.trim())), "/bin/true in container {} does not end", bundle.id);
    Ok(vec![created, started, run(&["delete", &bundle.id])?])
}

fn run(scene: &Scene, life: &Life<'_>) -> Result<Vec<Duration>> {
    let dir = life.bundle.dir.to_string_lossy();
    Ok(vec![scene.timed(command(scene, life, &["run", "--bundle", &dir, &life.bundle.id])?)?])
}

fn version(scene: &Scene, life: &Life<'_>) -> Result<Vec<Duration>> {
    Ok(vec![scene.timed(command(scene, life, &["--version"])?)?])
}
