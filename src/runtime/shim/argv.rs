//! Parses the command line of runc and crun: the command, the container and the files, then the options themselves, in the two
//! ways to parse them: Go's `flag` package behind urfave/cli (runc) and GNU `getopt_long` behind argp (crun). It changes
//! nothing and runs nothing.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

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
        let table = if dialect == Dialect::Crun { CRUN_GLOBAL } else { RUNC_GLOBAL };
        let scan = parse_in_order(&args[at..], table, dialect);
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
        "create" | "run" => START,
        "restore" | "checkpoint" => CRIU,
        "update" => UPDATE,
        "kill" => KILL,
        "delete" => DELETE,
        "exec" => return parse_exec(own, behind, dialect),
        _ => return (None, Command::Other),
    };
    let scan = parse_permuted(own, table, dialect);
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
    let table = if dialect == Dialect::Crun { CRUN_EXEC } else { RUNC_EXEC };
    let scan = parse_in_order(args, table, dialect);
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

/// Whose command line it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// runc, and whatever copies it.
    Runc,
    /// crun and krun.
    Crun,
}

/// Options, as Perl's `Getopt::Long` writes them: `name|letter`, and behind it `=` for a value that is attached or the next
/// argument, or `:` for one that is attached if there is any.
type Table = &'static str;

/// One option.
struct Flag {
    /// Long name without dashes.
    name: &'static str,
    /// One letter; empty if it has none.
    letter: &'static str,
    /// Whether it takes a value: the mark behind it in the table. One without allows `--name=false` with runc.
    takes: &'static str,
}

/// Global options of runc 1.0 to 1.4 (`runc --help`).
const RUNC_GLOBAL: Table = "debug log= log-format= root= criu= systemd-cgroup rootless= help|h version|v";

/// Global options of crun 1.8 to 1.21 (`crun --help`, crun.c).
const CRUN_GLOBAL: Table = "debug cgroup-manager= systemd-cgroup log= log-format= log-level= root= \
                                       rootless= version|v version|V help|? usage";

/// `create` and `run` of both: an option that only the other one has makes the runtime itself refuse.
const START: Table = "bundle|b= config|f= console-socket= pidfd-socket= pid-file= preserve-fds= no-pivot \
                                 no-new-keyring no-subreaper keep detach|d help|h help|? usage";

/// runc's `exec`.
const RUNC_EXEC: Table = "tty|t additional-gids|g= ignore-paused pidfd-socket= help|h console-socket= cwd= \
                                     env|e= user|u= process|p= detach|d pid-file= process-label= apparmor= \
                                     no-new-privs cap|c= preserve-fds= cgroup=";

/// crun's `exec`.
const CRUN_EXEC: Table = "tty|t: help|? usage console-socket= cwd= env|e= user|u= process|p= detach|d \
                                     pid-file= process-label= apparmor= no-new-privs cap|c= preserve-fds= cgroup=";

/// `update` of both.
const UPDATE: Table = "resources|r= help|h help|? usage";

/// `kill` of both.
const KILL: Table = "all|a regex|r help|h help|? usage";

/// `delete` of both.
const DELETE: Table = "force|f regex|r help|h help|? usage";

/// `checkpoint` and `restore` of both.
const CRIU: Table = "bundle|b= detach|d console-socket= image-path= work-path= parent-path= pid-file= \
                                manage-cgroups-mode= empty-ns= status-fd= page-server= lsm-profile= \
                                lsm-mount-context= leave-running tcp-established tcp-skip-in-flight link-remap \
                                ext-unix-sk shell-job file-locks lazy-pages pre-dump auto-dedup no-subreaper \
                                no-pivot help|h help|? usage";

fn read_table(table: Table) -> Vec<Flag> {
    let read = |option: &'static str| {
        let names = option.trim_end_matches(['=', ':']);
        let (name, letter) = names.split_once('|').unwrap_or((names, ""));
        Flag { name, letter, takes: &option[names.len()..] }
    };
    table.split_ascii_whitespace().map(read).collect()
}

/// Parsed arguments.
#[derive(Debug, Default)]
struct Scan<'a> {
    /// Options in their order, by long name.
    given: Vec<(&'static str, Option<&'a OsStr>)>,
    /// Options given by their letter: runc refuses an option that is given in both forms.
    pub letters: Vec<&'static str>,
    pub operands: Vec<&'a OsStr>,
    /// Index of the argument that ended the options: the first operand, or `--`.
    pub end: usize,
    /// An option is not in the table, so it is unknown whether the next argument is its value.
    pub unknown: bool,
}

impl<'a> Scan<'a> {
    /// The value that counts: the last one.
    pub fn value(&self, name: &str) -> Option<&'a OsStr> {
        self.values(name).last()
    }

    /// All values of an option that may be repeated.
    pub fn values<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'a OsStr> + 's {
        self.given.iter().filter(move |(given, _)| *given == name).filter_map(|(_, value)| *value)
    }

    /// Whether a switch is on. Words for true: Go's `strconv.ParseBool`.
    pub fn is_set(&self, name: &str) -> bool {
        self.given.iter().rev().find(|(given, _)| *given == name).is_some_and(|(_, value)| {
            value.is_none_or(|value| {
                matches!(value.as_bytes(), b"1" | b"t" | b"T" | b"TRUE" | b"true" | b"True")
            })
        })
    }

    pub fn wants_help(&self) -> bool {
        self.is_set("help") || self.is_set("usage") || self.is_set("version")
    }
}

/// Parses options up to the first operand.
fn parse_in_order(args: &[OsString], table: Table, dialect: Dialect) -> Scan<'_> {
    let args: Vec<&OsStr> = args.iter().map(OsString::as_os_str).collect();
    match dialect {
        Dialect::Runc => parse_go(&args, &read_table(table)),
        Dialect::Crun => parse_getopt(&args, &read_table(table)),
    }
}

/// As runc parses its commands other than `exec`: options may follow operands. crun parses all of its commands in order.
fn parse_permuted(args: &[OsString], table: Table, dialect: Dialect) -> Scan<'_> {
    if dialect == Dialect::Crun {
        return parse_in_order(args, table, dialect);
    }
    let flags = read_table(table);
    parse_go(&reorder_args(args, &flags), &flags)
}

/// urfave/cli v1's `reorderArgs`, with its quirk that a word behind any option moves with it.
fn reorder_args<'a>(args: &'a [OsString], flags: &[Flag]) -> Vec<&'a OsStr> {
    let (mut front, mut back) = (Vec::new(), Vec::new());
    let mut value_may_follow = false;
    for (index, arg) in args.iter().enumerate() {
        let bytes = arg.as_bytes();
        if bytes == b"--" {
            back.extend(args[index..].iter().map(OsString::as_os_str));
            break;
        } else if value_may_follow && !bytes.starts_with(b"-") {
            value_may_follow = false;
            front.push(arg.as_os_str());
        } else if split_go_flag(bytes).is_some_and(|(name, _)| find_go_flag(flags, name).is_some()) {
            value_may_follow = !bytes.contains(&b'=');
            front.push(arg.as_os_str());
        } else {
            back.push(arg.as_os_str());
        }
    }
    front.append(&mut back);
    front
}

/// Go's `flag.FlagSet.Parse`: one dash or two, `=value` or the next argument whatever it looks like.
fn parse_go<'a>(args: &[&'a OsStr], flags: &[Flag]) -> Scan<'a> {
    let mut scan = Scan::default();
    let mut next = 0;
    while let Some((name, attached)) = args.get(next).and_then(|arg| split_go_flag(arg.as_bytes())) {
        next += 1;
        let Some(flag) = find_go_flag(flags, name) else {
            scan.unknown = true;
            continue;
        };
        if name != flag.name.as_bytes() {
            scan.letters.push(flag.name);
        }
        if flag.takes.is_empty() || attached.is_some() {
            scan.given.push((flag.name, attached));
        } else {
            scan.given.push((flag.name, args.get(next).copied()));
            next += 1;
        }
    }
    scan.finish(args, next)
}

/// The name and attached value of an option in Go's notation; `None` for `-`, `--` and operands.
fn split_go_flag(arg: &[u8]) -> Option<(&[u8], Option<&OsStr>)> {
    let name = arg.strip_prefix(b"--").or_else(|| arg.strip_prefix(b"-"))?;
    (!name.is_empty()).then(|| split_value(name))
}

fn find_go_flag<'f>(flags: &'f [Flag], name: &[u8]) -> Option<&'f Flag> {
    flags.iter().find(|flag| name == flag.name.as_bytes() || name == flag.letter.as_bytes())
}

/// `getopt_long`: long options may be abbreviated, letters may be clustered, values attached.
fn parse_getopt<'a>(args: &[&'a OsStr], flags: &[Flag]) -> Scan<'a> {
    let mut scan = Scan::default();
    let mut next = 0;
    while let Some(arg) = args.get(next).map(|arg| arg.as_bytes()) {
        let Some(rest) = arg.strip_prefix(b"-").filter(|rest| !rest.is_empty() && *rest != b"-") else {
            break;
        };
        next += 1;
        let wants_next = match rest.strip_prefix(b"-") {
            Some(long) => scan.parse_long(long, flags),
            None => scan.parse_letters(rest, flags),
        };
        if let Some(name) = wants_next {
            scan.given.push((name, args.get(next).copied()));
            next += 1;
        }
    }
    scan.finish(args, next)
}

impl<'a> Scan<'a> {
    /// Returns the option's name if its value is the next argument.
    fn parse_long(&mut self, text: &'a [u8], flags: &[Flag]) -> Option<&'static str> {
        let (name, attached) = split_value(text);
        let Some(flag) = find_long_flag(flags, name) else {
            self.unknown = true;
            return None;
        };
        match (flag.takes, attached) {
            ("=", None) => return Some(flag.name),
            ("", Some(_)) => self.unknown = true,
            (_, attached) => self.given.push((flag.name, attached)),
        }
        None
    }

    /// Parses clustered letters. Returns the last one's name if its value is the next argument.
    fn parse_letters(&mut self, letters: &'a [u8], flags: &[Flag]) -> Option<&'static str> {
        for (index, letter) in letters.iter().enumerate() {
            let Some(flag) = flags.iter().find(|flag| flag.letter.as_bytes() == [*letter]) else {
                self.unknown = true;
                return None;
            };
            let attached = Some(&letters[index + 1..]).filter(|rest| !rest.is_empty()).map(OsStr::from_bytes);
            match (flag.takes, attached) {
                ("", _) => self.given.push((flag.name, None)),
                ("=", None) => return Some(flag.name),
                (_, attached) => {
                    self.given.push((flag.name, attached));
                    return None;
                }
            }
        }
        None
    }

    /// Sets the operands; `--` is none.
    fn finish(mut self, args: &[&'a OsStr], end: usize) -> Self {
        self.end = end.min(args.len());
        let rest = &args[self.end..];
        self.operands = if rest.first().is_some_and(|arg| *arg == "--") { &rest[1..] } else { rest }.to_vec();
        self
    }
}

/// The option with this name, or the only option that begins with it.
fn find_long_flag<'f>(flags: &'f [Flag], name: &[u8]) -> Option<&'f Flag> {
    if let Some(exact) = flags.iter().find(|flag| name == flag.name.as_bytes()) {
        return Some(exact);
    }
    let mut candidates = flags.iter().filter(|flag| flag.name.as_bytes().starts_with(name));
    let first = candidates.next()?;
    candidates.all(|other| other.name == first.name).then_some(first)
}

/// `name=value`; an `=` in the first place belongs to the name.
fn split_value(text: &[u8]) -> (&[u8], Option<&OsStr>) {
    match text.iter().skip(1).position(|byte| *byte == b'=') {
        Some(at) => (&text[..=at], Some(OsStr::from_bytes(&text[at + 2..]))),
        None => (text, None),
    }
}

#[cfg(test)]
#[path = "argv_tests.rs"]
mod tests;
