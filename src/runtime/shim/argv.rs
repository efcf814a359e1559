//! Parses the command line of runc and crun: the command, the container and the files. It changes
//! nothing and runs nothing.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use super::flags::{self, Dialect, Scan};

/// A command line, parsed as far as sublet needs it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    /// The options before the command.
    pub global: Global,
    /// The container; `None` if it is unknown.
    pub id: Option<OsString>,
    /// The command.
    pub command: Command,
}

/// Global options.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Global {
    /// `--root`: where the runtime keeps its containers' state.
    pub root: Option<PathBuf>,
    /// `--log`, without crun's prefix `file:`. crun's `journald:` and `syslog:` are ignored.
    pub log: Option<PathBuf>,
    /// `--log-format json`.
    pub log_json: bool,
    /// `--debug`.
    pub debug: bool,
}

/// The commands that concern sublet.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Command {
    /// `create`.
    Create(Start),
    /// `run`: create, start, wait and delete in one.
    Run(Start),
    /// `exec`.
    Exec(Exec),
    /// `kill` of one container.
    Kill {
        /// The signal, by its number or name; else SIGTERM.
        signal: Option<OsString>,
        /// `--all`: every process of the container.
        all: bool,
    },
    /// `delete` of one container.
    Delete {
        /// `--force`: also if it runs.
        force: bool,
    },
    /// `restore`.
    Restore(Start),
    /// `checkpoint`.
    Checkpoint,
    /// `update`.
    Update {
        /// `--resources`: a file.
        resources: Option<PathBuf>,
    },
    /// Everything else: help, and command lines that the runtime will refuse. It is passed on unchanged.
    #[default]
    Other,
}

/// `create`, `run`, `restore`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// `--bundle`; else the current directory.
    pub bundle: Option<PathBuf>,
    /// crun's `--config`; else `config.json` in the bundle.
    pub config: Option<PathBuf>,
}

/// `exec`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Exec {
    /// Candidates for the container's id, if an unknown option makes that ambiguous.
    pub names: Vec<OsString>,
    /// `--process`.
    pub process: Option<PathBuf>,
    /// Each `--env`.
    pub env: Vec<OsString>,
    /// Options given by their letter: runc refuses an option that is given in both forms.
    pub letters: Vec<&'static str>,
    /// The index among all arguments at which more options may be inserted.
    pub options_end: usize,
}

/// The commands of runc and crun, to distinguish one from the value of an unknown option.
const COMMANDS: &str = "checkpoint create delete events exec features help h kill list mounts pause ps restore resume \
                        run spec start state update";

/// Parses `args`, without the program's name.
pub fn parse(args: &[OsString], dialect: Dialect) -> CommandLine {
    let mut global = Global::default();
    let mut at = 0;
    loop {
        let table = if dialect == Dialect::Crun { flags::CRUN_GLOBAL } else { flags::RUNC_GLOBAL };
        let scan = flags::parse_in_order(&args[at..], table, dialect);
        global.set_options(&scan, dialect);
        let Some(word) = scan.operands.first().filter(|_| !scan.wants_help()) else {
            return CommandLine { global, ..CommandLine::default() };
        };
        let behind = args.len() - scan.operands.len() + 1;
        if scan.unknown && !COMMANDS.split(' ').any(|command| *word == command) {
            // The value of an option that only a later version of the runtime has.
            at = behind;
            continue;
        }
        // Not every argument that is a command's name is the command: a container may be called `create`.
        let (id, command) = parse_command(word, args, behind, dialect);
        return CommandLine { global, id, command };
    }
}

impl Global {
    /// Takes the options in `scan`. The last one counts.
    fn set_options(&mut self, scan: &Scan<'_>, dialect: Dialect) {
        if let Some(root) = scan.value("root") {
            self.root = Some(root.into());
        }
        if let Some(log) = scan.value("log") {
            self.log = parse_log(log, dialect);
        }
        if let Some(format) = scan.value("log-format") {
            self.log_json = format == "json";
        }
        self.debug |= scan.is_set("debug") || scan.value("log-level").is_some_and(|level| level == "debug");
    }
}

/// crun's log destinations are `[file:]PATH`, `journald:ID` and `syslog:ID` (crun.1).
fn parse_log(destination: &OsStr, dialect: Dialect) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;
    if dialect == Dialect::Runc {
        return Some(destination.into());
    }
    let bytes = destination.as_bytes();
    let is_file = !bytes.starts_with(b"journald:") && !bytes.starts_with(b"syslog:");
    is_file.then(|| OsStr::from_bytes(bytes.strip_prefix(b"file:").unwrap_or(bytes)).into())
}

/// The container, and the command `word`, whose own arguments are `args[behind..]`.
fn parse_command(
    word: &OsStr,
    args: &[OsString],
    behind: usize,
    dialect: Dialect,
) -> (Option<OsString>, Command) {
    let (word, own) = (word.to_str().unwrap_or_default(), &args[behind..]);
    let table = match word {
        "create" | "run" => flags::START,
        "restore" | "checkpoint" => flags::CRIU,
        "update" => flags::UPDATE,
        "kill" => flags::KILL,
        "delete" => flags::DELETE,
        "exec" => return parse_exec(own, behind, dialect),
        _ => return (None, Command::Other),
    };
    let scan = flags::parse_permuted(own, table, dialect);
    // With `--regex` the operand is not an id. The runtime handles it alone, and the next command frees the leases.
    if scan.wants_help() || scan.is_set("regex") {
        return (None, Command::Other);
    }
    let (id, path) = (only_operand(&scan), |name| scan.value(name).map(PathBuf::from));
    // For an empty `--bundle`, runc uses the current directory (`setupSpec` in `utils_linux.go`).
    let bundle = path("bundle").filter(|dir| !dir.as_os_str().is_empty() || dialect == Dialect::Crun);
    let start = Start { bundle, config: path("config").filter(|_| dialect == Dialect::Crun) };
    let command = match word {
        "create" => Command::Create(start),
        "run" => Command::Run(start),
        "restore" => Command::Restore(start),
        "checkpoint" => Command::Checkpoint,
        // Engines pass the changes in a file. The other options are for people, and name no devices.
        "update" => Command::Update { resources: path("resources") },
        "delete" => Command::Delete { force: scan.is_set("force") },
        _ if scan.unknown => return (None, Command::Other),
        // `kill`: the signal comes after the id.
        _ => {
            let (id, signal) = match scan.operands[..] {
                [id, signal] => (Some(id.to_owned()), Some(signal.to_owned())),
                _ => (id, None),
            };
            return (id, Command::Kill { signal, all: scan.is_set("all") });
        }
    };
    (id, command)
}

/// After the id comes the command to run, whose options are not the runtime's.
fn parse_exec(args: &[OsString], behind: usize, dialect: Dialect) -> (Option<OsString>, Command) {
    let table = if dialect == Dialect::Crun { flags::CRUN_EXEC } else { flags::RUNC_EXEC };
    let scan = flags::parse_in_order(args, table, dialect);
    if scan.wants_help() {
        return (None, Command::Other);
    }
    let process = scan.value("process").map(PathBuf::from);
    let id = match (scan.unknown, &process) {
        (false, _) => scan.operands.first().map(|id| (*id).to_owned()),
        (true, Some(_)) => only_operand(&scan),
        (true, None) => None,
    };
    let names = if id.is_some() { &[][..] } else { &scan.operands };
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    let env = scan.values("env").map(OsStr::to_owned).collect();
    let options_end = behind + scan.end;
    (id, Command::Exec(Exec { names, process, env, letters: scan.letters, options_end }))
}

/// The id, if there is one operand. With more operands the runtime refuses, or one of them is an unknown option's
/// value.
fn only_operand(scan: &Scan<'_>) -> Option<OsString> {
    match scan.operands[..] {
        [id] => Some(id.to_owned()),
        _ => None,
    }
}

#[cfg(test)]
#[path = "argv_tests.rs"]
mod tests;
