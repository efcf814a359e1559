//! The result as a table and as JSON.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use serde_json::{Value, json};

use crate::Arguments;
use crate::picture;
use crate::rows::{Group, Row};
use crate::scene::{DOCKER_CONFIG, Scene};

/// Where and how it was measured.
pub struct Facts {
    /// GPU and driver, with SIMULATED where that is so.
    pub gpu: String,
    pub runtime: String,
    pub kernel: String,
    pub cores: usize,
    pub calls: usize,
    pub cycles: usize,
    pub serve: bool,
    /// Seconds since the epoch.
    pub time: u64,
    /// Mounts of one share: driver files and directories.
    pub mounts: usize,
}

impl Facts {
    pub fn of(scene: &Scene, arguments: &Arguments) -> Self {
        let status = scene.world.status();
        let word = |at: &str| status.pointer(at).and_then(Value::as_str).unwrap_or("?").to_owned();
        let simulated = if status["driver"]["simulated"] == json!(true) { " (SIMULATED)" } else { "" };
        let first_line = |program: &str, argument: &str| {
            let output = Command::new(program).arg(argument).output();
            let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            text.unwrap_or_default().lines().next().unwrap_or_default().to_owned()
        };
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            gpu: format!("{}, driver {}{simulated}", word("/devices/0/name"), word("/driver/version")),
            runtime: first_line(scene.world.engine.program(), "--version"),
            kernel: first_line("uname", "-r"),
            cores: std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
            calls: arguments.rounds,
            cycles: arguments.cycles,
            serve: arguments.serve,
            time: since.map_or(0, |since| since.as_secs()),
            mounts: scene.mounts.get(),
        }
    }

    /// In one line.
    pub fn heading(&self) -> String {
        let served = if self.serve { ", `sublet serve` runs" } else { "" };
        format!(
            "{}; {}, Linux {}, {} cores; {} mounts a share{served}; medians of {} rounds of calls and {} of containers, in turns",
            self.gpu, self.runtime, self.kernel, self.cores, self.mounts, self.calls, self.cycles
        )
    }
}

/// Prints a table for each group.
pub fn print(facts: &Facts, groups: &[Group]) {
    let bytes = serde_json::from_str::<Value>(DOCKER_CONFIG).map_or(0, |spec| spec.to_string().len());
    println!("{}; config.json of about {} KB", facts.heading(), bytes / 1000);
    for group in groups {
        let in_parts = is_in_parts(group);
        let (names, bars) = if in_parts { (" create | start | delete |", "---|---|---|") } else { ("", "") };
        println!("\n### {}\n", group.title);
        println!("| what | median ms | more, ms | ratio | goal |{names}");
        println!("|---|---|---|---|---|{bars}");
        for row in &group.rows {
            let base = base_of(group, row);
            let (median, more) = (row.median(), row.more(base));
            let ratio = median / base.median();
            print!("| {} | {median:.2} | {more:+.2} | {ratio:.3} | {} |", row.what, row.goal);
            if in_parts {
                print!(" {:.2} | {:.2} | {:.2} |", row.part(0), row.part(1), row.part(2));
            }
            println!();
        }
    }
}

fn is_in_parts(group: &Group) -> bool {
    group.rows[0].times[0].len() == 3
}

/// What `row` is compared with: the nearest bare row before it.
pub fn base_of<'a>(group: &'a Group, row: &Row) -> &'a Row {
    let at = group.rows.iter().position(|other| std::ptr::eq(other, row)).unwrap_or(0);
    let bare = group.rows[..=at].iter().rev().find(|row| row.what.starts_with("bare"));
    bare.unwrap_or(&group.rows[0])
}

/// Everything, with the time of each round.
fn document(facts: &Facts, groups: &[Group]) -> Value {
    let row = |group: &Group, row: &Row| {
        let mut all = json!({
            "what": row.what, "goal": row.goal, "median_ms": rounded(row.median()),
            "more_ms": rounded(row.more(base_of(group, row))),
            "ratio": rounded(row.median() / base_of(group, row).median()),
            "rounds_ms": row.totals().into_iter().map(rounded).collect::<Vec<_>>(),
        });
        if is_in_parts(group) {
            for (part, name) in ["create_ms", "start_ms", "delete_ms"].into_iter().enumerate() {
                all[name] = json!(rounded(row.part(part)));
            }
        }
        all
    };
    let group = |group: &Group| {
        let rows: Vec<Value> = group.rows.iter().map(|one| row(group, one)).collect();
        json!({"title": group.title, "rows": rows})
    };
    json!({
        "schema": "sublet.start-cost/1", "gpu": facts.gpu, "runtime": facts.runtime, "kernel": facts.kernel,
        "cores": facts.cores, "mounts": facts.mounts, "serve": facts.serve, "time": facts.time,
        "groups": groups.iter().map(group).collect::<Vec<_>>(),
    })
}

/// To microseconds.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Writes JSON and picture to `directory`.
pub fn write(facts: &Facts, groups: &[Group], directory: Option<&Path>) -> Result<()> {
    let Some(directory) = directory else { return Ok(()) };
    std::fs::create_dir_all(directory)?;
    let text = serde_json::to_string_pretty(&document(facts, groups))?;
    std::fs::write(directory.join("start-cost.json"), text + "\n")?;
    std::fs::write(directory.join("start-cost.svg"), picture::svg(facts, groups))?;
    Ok(())
}
