//! A case, its expectation, and the table of results.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use sublet_e2e::{World, bin_dir, in_one_line};

use super::watch::{Before, put_back};

/// A command that takes longer counts as hanging.
const LONGEST: &str = "25";

/// The longest text in a cell of the table, in characters.
const SHOWN: usize = 230;

/// One line of the table.
pub struct Case {
    what: &'static str,
    command: &'static str,
    expected: Expect,
    harms: bool,
}

/// The possible expectations.
pub enum Expect {
    /// The command fails with one line from sublet that contains these words, before there is a container or a lease.
    Refused(&'static str),
    /// The low-level runtime or the engine fails the command, with these words in its message.
    Fails(&'static str),
    /// The program in the container has exactly this share, and only this GPU's nodes.
    Share(Share),
    /// A container without sublet's keys runs and sees no GPU.
    Plain,
    /// Exit status 0, and these words on standard output.
    Works(&'static str),
    /// The command may succeed or fail. Nothing may be left of it.
    Still,
}

/// A share of a GPU, or of a MIG device.
#[derive(Clone, Copy)]
pub struct Share {
    pub sm: u64,
    /// `None`: no limit.
    pub gib: Option<u64>,
    /// As the program inside lists them.
    pub nodes: &'static str,
}

/// The share that the cases' containers request.
pub const QUARTER: Expect = Expect::Share(OF_H200);
pub const OF_H200: Share = Share { sm: 32, gib: Some(8), nodes: NODES };

/// The device nodes of a share of this GPU.
const NODES: &str = "nodes: nvidia-uvm nvidia-uvm-tools nvidia0 nvidiactl";

pub const fn case(what: &'static str, command: &'static str, expected: Expect) -> Case {
    Case { what, command, expected, harms: false }
}

impl Case {
    /// The case itself ends or stops the neighbour's daemon.
    pub const fn harming(mut self) -> Self {
        self.harms = true;
        self
    }
}

/// A machine with a neighbour on its GPU, as a case uses it.
pub trait Stage {
    fn world(&self) -> &World;
    /// What a reader of the table must know and type first.
    fn prelude(&self) -> &str;
    fn variables(&self) -> Vec<(&'static str, PathBuf)>;
    /// Prepares the state that every case starts with.
    fn before(&self);
    /// The ids of all containers, including the neighbour's.
    fn containers(&self) -> Vec<String>;
    fn remove(&self, id: &str) -> Result<(), String>;
    /// What a process in the neighbour's container reports about its GPU.
    fn neighbour(&self) -> Seen;
    /// The neighbour's id in the ledger and in [`Self::containers`].
    fn neighbour_id(&self) -> String {
        NEIGHBOUR.to_owned()
    }

    /// The neighbour's share.
    fn neighbour_share(&self) -> Share {
        OF_H200
    }

    /// Restarts the parts of the engine that the case has ended.
    fn mend(&mut self) {}

    /// A text that occurs in the cgroup paths of this stage's containers only.
    fn cgroups(&self) -> String {
        self.world().dir.path().file_name().expect("a name").to_string_lossy().into_owned()
    }

    /// A text that occurs in the neighbour's cgroup path only.
    fn neighbour_cgroup(&self) -> String {
        format!("{}-{NEIGHBOUR}", self.cgroups())
    }
}

/// The neighbour's container.
pub const NEIGHBOUR: &str = "neighbour";

/// An entry point.
pub struct EntryPoint {
    pub name: &'static str,
    pub open: fn() -> Box<dyn Stage>,
    pub cases: fn() -> Vec<Case>,
}

/// The result of a command.
pub struct Seen {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Seen {
    fn info(&self) -> Option<Value> {
        let mut lines = self.stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.find(|line| line["event"] == "info")
    }

    fn nodes(&self) -> &str {
        self.stdout.lines().find(|line| line.starts_with("nodes:")).unwrap_or("no line of nodes").trim_end()
    }

    /// The result in one line, for the table.
    fn shown(&self, world: &World) -> String {
        let dir = world.dir.path().display().to_string();
        let programs = bin_dir().display().to_string();
        let said = match self.info() {
            Some(info) if info["error"].is_null() => {
                let mps = if info["mps"] == true { ", MPS" } else { "" };
                format!("{} SMs, {} MiB free{mps}; {}", info["sm"], info["free_mib"], self.nodes())
            }
            Some(info) => format!("{}; {}", info["error"].as_str().unwrap_or("?"), self.nodes()),
            None if self.stderr.trim().is_empty() => self.stdout.trim().to_owned(),
            None => self.stderr.trim().to_owned(),
        };
        let said = said.replace(&dir, "$DIR").replace(&programs, "$BIN").replace('\n', " ⏎ ");
        let said: String = said.chars().map(|c| if c.is_control() { '␛' } else { c }).collect();
        let short: String = said.chars().take(SHOWN).collect();
        let more = if short.len() < said.len() { "…" } else { "" };
        let code = self.code.map_or_else(|| "a signal".to_owned(), |code| code.to_string());
        format!("{code}: {short}{more}")
    }
}

impl Share {
    pub fn check(&self, seen: &Seen) -> Result<(), String> {
        let info = seen.info().ok_or("no program said what it has")?;
        let free = info["free_mib"].as_u64().unwrap_or_default();
        let is_free = self.gib.map_or(free > 130_000, |gib| free <= gib << 10 && free + 700 > gib << 10);
        let of_share = [&info["error"], &info["sm"], &info["mps"], &info["count"]];
        if of_share != [&Value::Null, &json!(self.sm), &json!(true), &json!(1)] || !is_free {
            return Err(format!("another share: {info}"));
        }
        if seen.nodes() == self.nodes { Ok(()) } else { Err(format!("other nodes: {}", seen.nodes())) }
    }
}

impl Expect {
    fn said(&self) -> String {
        match self {
            Self::Refused(words) => format!("refused: “{words}”"),
            Self::Fails(words) => format!("the runtime below fails: “{words}”"),
            Self::Share(share) => {
                let memory = share.gib.map_or("no limit".to_owned(), |gib| format!("{gib} GiB"));
                format!("its share: {} SMs, {memory}", share.sm)
            }
            Self::Plain => "it runs, and sees no GPU".to_owned(),
            Self::Works("") => "it works".to_owned(),
            Self::Works(words) => format!("it works: “{}”", words.replace('\n', " ⏎ ")),
            Self::Still => "nothing is left of it".to_owned(),
        }
    }

    fn check(&self, seen: &Seen) -> Result<(), String> {
        let fails = |words: &str| match seen.code {
            Some(1..) if seen.info().is_none() && in_one_line(&seen.stderr).contains(words) => Ok(()),
            Some(1..) if seen.info().is_none() => Err("other words".to_owned()),
            _ => Err("it did not fail".to_owned()),
        };
        match self {
            Self::Refused(words) => match in_one_line(&seen.stderr).lines().count() {
                1 => fails(words),
                lines => Err(format!("{lines} lines")),
            },
            Self::Fails(words) => fails(words),
            Self::Share(_) | Self::Plain | Self::Works(_) if seen.code != Some(0) => {
                Err("it failed".to_owned())
            }
            Self::Share(share) => share.check(seen),
            Self::Plain => match seen.info() {
                Some(info) if !info["error"].is_null() && seen.nodes() == "nodes:" => Ok(()),
                _ => Err("it sees something".to_owned()),
            },
            Self::Works(words) if seen.stdout.contains(words) => Ok(()),
            Self::Works(_) => Err("other words".to_owned()),
            Self::Still => Ok(()),
        }
    }
}

/// Runs the cases of an entry point and returns how many FAILED.
pub fn try_entry_point(entry_point: &EntryPoint) -> usize {
    let only = std::env::var("SUBLET_CASES_ONLY").unwrap_or_default();
    let below = std::env::var_os("SUBLET_CASES_BELOW").is_some();
    let is_wanted =
        |case: &Case| case.what.contains(&only) && !(below && matches!(case.expected, Expect::Refused(_)));
    let mut stage = (entry_point.open)();
    let engine = stage.world().engine.program();
    let mut text = format!(
        "## {}, {engine}\n\n{}\n\n| | what | command | expected | seen | |\n|---|---|---|---|---|---|\n",
        entry_point.name,
        stage.prelude()
    );
    let mut failed = 0;
    for (at, case) in (entry_point.cases)().iter().enumerate().filter(|(_, case)| is_wanted(case)) {
        let (seen, problems) = try_case(&mut *stage, case);
        let verdict = if problems.is_empty() { "ok".to_owned() } else { format!("FAILED: {problems}") };
        let (number, expected) = (at + 1, case.expected.said());
        let cells = [case.what, &format!("`{}`", case.command), &expected, &seen, &verdict];
        let cells = cells.map(|cell| cell.replace('|', "\\|")).join(" | ");
        println!("{} {engine} {number} | {cells}", entry_point.name);
        writeln!(text, "| {number} | {cells} |").expect("a String");
        if !problems.is_empty() {
            failed += 1;
            // Whatever the case broke must not affect the next case.
            stage = (entry_point.open)();
        }
    }
    text.push('\n');
    if let Some(to) = std::env::var_os("SUBLET_CASES_TO") {
        let file = File::options().create(true).append(true).open(to);
        file.and_then(|mut file| file.write_all(text.as_bytes())).expect("the table is written");
    }
    failed
}

/// What was seen, and the differences from the expectation.
fn try_case(stage: &mut dyn Stage, case: &Case) -> (String, String) {
    stage.before();
    let before = Before::look(stage);
    let seen = run(stage, case.command);
    stage.mend();
    let mut problems: Vec<String> = case.expected.check(&seen).err().into_iter().collect();
    if matches!(case.expected, Expect::Refused(_)) {
        problems.extend(before.changed(stage));
    }
    put_back(stage, &before);
    problems.extend(before.left(stage, case.harms));
    (seen.shown(stage.world()), problems.join("; "))
}

/// Runs the command after the prelude, in a separate directory.
fn run(stage: &dyn Stage, command: &str) -> Seen {
    let scratch = stage.world().dir.path().join("scratch");
    let open = |name: &str| File::create(stage.world().dir.path().join(name)).expect("an output file");
    let functions = stage.prelude().split("```").nth(1).expect("a block of shell").trim_start_matches("sh\n");
    let mut bash = Command::new("timeout");
    bash.args(["--signal=KILL", LONGEST, "bash", "-c"]).arg(format!("{functions}\n{command}"));
    bash.current_dir(scratch).envs(stage.variables()).env("SUBLET_CASE", "1");
    // Output goes to files, because a process that keeps a pipe open would delay the reader.
    let status = bash.stdin(Stdio::null()).stdout(open("said")).stderr(open("complained")).status();
    let read = |name: &str| {
        let text = std::fs::read(stage.world().dir.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    };
    Seen { code: status.expect("bash runs").code(), stdout: read("said"), stderr: read("complained") }
}
