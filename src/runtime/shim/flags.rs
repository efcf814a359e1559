//! The options of runc and crun, and the two ways to parse them: Go's `flag` package behind urfave/cli
//! (runc) and GNU `getopt_long` behind argp (crun).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

/// Whose command line it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// runc, and whatever copies it.
    Runc,
    /// crun and krun.
    Crun,
}

/// One option.
#[derive(Debug)]
pub(super) struct Flag {
    /// Long name without dashes.
    name: &'static str,
    /// One letter, if it has one.
    short: Option<u8>,
    takes: Takes,
}

/// The option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    /// Nothing; runc's booleans allow `--name=false`.
    Nothing,
    /// A value, attached or as the next argument.
    Value,
    /// A value only if it is attached.
    Attached,
}

const fn flag(name: &'static str, short: Option<u8>, takes: Takes) -> Flag {
    Flag { name, short, takes }
}
const fn switch(name: &'static str) -> Flag {
    flag(name, None, Takes::Nothing)
}
const fn value(name: &'static str) -> Flag {
    flag(name, None, Takes::Value)
}

/// Global options of runc 1.0 to 1.4 (`runc --help`).
pub(super) const RUNC_GLOBAL: &[Flag] = &[
    switch("debug"),
    value("log"),
    value("log-format"),
    value("root"),
    value("criu"),
    switch("systemd-cgroup"),
    value("rootless"),
    flag("help", Some(b'h'), Takes::Nothing),
    flag("version", Some(b'v'), Takes::Nothing),
];

/// Global options of crun 1.8 to 1.21 (`crun --help`, crun.c).
pub(super) const CRUN_GLOBAL: &[Flag] = &[
    switch("debug"),
    value("cgroup-manager"),
    switch("systemd-cgroup"),
    value("log"),
    value("log-format"),
    value("log-level"),
    value("root"),
    value("rootless"),
    flag("version", Some(b'v'), Takes::Nothing),
    flag("version", Some(b'V'), Takes::Nothing),
    flag("help", Some(b'?'), Takes::Nothing),
    switch("usage"),
];

/// `create` and `run` of both: an option that only the other one has makes the runtime itself refuse.
pub(super) const START: &[Flag] = &[
    flag("bundle", Some(b'b'), Takes::Value),
    flag("config", Some(b'f'), Takes::Value),
    value("console-socket"),
    value("pidfd-socket"),
    value("pid-file"),
    value("preserve-fds"),
    switch("no-pivot"),
    switch("no-new-keyring"),
    switch("no-subreaper"),
    switch("keep"),
    flag("detach", Some(b'd'), Takes::Nothing),
    flag("help", Some(b'h'), Takes::Nothing),
    flag("help", Some(b'?'), Takes::Nothing),
    switch("usage"),
];

/// runc's `exec`.
pub(super) const RUNC_EXEC: &[Flag] = &[
    flag("tty", Some(b't'), Takes::Nothing),
    flag("additional-gids", Some(b'g'), Takes::Value),
    switch("ignore-paused"),
    value("pidfd-socket"),
    flag("help", Some(b'h'), Takes::Nothing),
    value("console-socket"),
    value("cwd"),
    flag("env", Some(b'e'), Takes::Value),
    flag("user", Some(b'u'), Takes::Value),
    flag("process", Some(b'p'), Takes::Value),
    flag("detach", Some(b'd'), Takes::Nothing),
    value("pid-file"),
    value("process-label"),
    value("apparmor"),
    switch("no-new-privs"),
    flag("cap", Some(b'c'), Takes::Value),
    value("preserve-fds"),
    value("cgroup"),
];

/// crun's `exec`.
pub(super) const CRUN_EXEC: &[Flag] = &[
    flag("tty", Some(b't'), Takes::Attached),
    flag("help", Some(b'?'), Takes::Nothing),
    switch("usage"),
    value("console-socket"),
    value("cwd"),
    flag("env", Some(b'e'), Takes::Value),
    flag("user", Some(b'u'), Takes::Value),
    flag("process", Some(b'p'), Takes::Value),
    flag("detach", Some(b'd'), Takes::Nothing),
    value("pid-file"),
    value("process-label"),
    value("apparmor"),
    switch("no-new-privs"),
    flag("cap", Some(b'c'), Takes::Value),
    value("preserve-fds"),
    value("cgroup"),
];

/// `update` of both.
pub(super) const UPDATE: &[Flag] = &[
    flag("resources", Some(b'r'), Takes::Value),
    flag("help", Some(b'h'), Takes::Nothing),
    flag("help", Some(b'?'), Takes::Nothing),
    switch("usage"),
];

/// `kill` of both.
pub(super) const KILL: &[Flag] = &[
    flag("all", Some(b'a'), Takes::Nothing),
    flag("regex", Some(b'r'), Takes::Nothing),
    flag("help", Some(b'h'), Takes::Nothing),
    flag("help", Some(b'?'), Takes::Nothing),
    switch("usage"),
];

/// `delete` of both.
pub(super) const DELETE: &[Flag] = &[
    flag("force", Some(b'f'), Takes::Nothing),
    flag("regex", Some(b'r'), Takes::Nothing),
    flag("help", Some(b'h'), Takes::Nothing),
    flag("help", Some(b'?'), Takes::Nothing),
    switch("usage"),
];

/// `checkpoint` and `restore` of both.
pub(super) const CRIU: &[Flag] = &[
    flag("bundle", Some(b'b'), Takes::Value),
    flag("detach", Some(b'd'), Takes::Nothing),
    value("console-socket"),
    value("image-path"),
    value("work-path"),
    value("parent-path"),
    value("pid-file"),
    value("manage-cgroups-mode"),
    value("empty-ns"),
    value("status-fd"),
    value("page-server"),
    value("lsm-profile"),
    value("lsm-mount-context"),
    switch("leave-running"),
    switch("tcp-established"),
    switch("tcp-skip-in-flight"),
    switch("link-remap"),
    switch("ext-unix-sk"),
    switch("shell-job"),
    switch("file-locks"),
    switch("lazy-pages"),
    switch("pre-dump"),
    switch("auto-dedup"),
    switch("no-subreaper"),
    switch("no-pivot"),
    flag("help", Some(b'h'), Takes::Nothing),
    flag("help", Some(b'?'), Takes::Nothing),
    switch("usage"),
];

/// Parsed arguments.
#[derive(Debug, Default)]
pub(super) struct Scan<'a> {
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
        let last = self.given.iter().rev().find(|(given, _)| *given == name);
        last.is_some_and(|(_, value)| {
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
pub(super) fn parse_in_order<'a>(args: &'a [OsString], flags: &[Flag], dialect: Dialect) -> Scan<'a> {
    let args: Vec<&OsStr> = args.iter().map(OsString::as_os_str).collect();
    match dialect {
        Dialect::Runc => parse_go(&args, flags),
        Dialect::Crun => parse_getopt(&args, flags),
    }
}

/// As runc parses its commands other than `exec`: options may follow operands. crun parses all of its commands in order.
pub(super) fn parse_permuted<'a>(args: &'a [OsString], flags: &[Flag], dialect: Dialect) -> Scan<'a> {
    match dialect {
        Dialect::Runc => parse_go(&reorder_args(args, flags), flags),
        Dialect::Crun => parse_in_order(args, flags, dialect),
    }
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
        if flag.takes == Takes::Nothing || attached.is_some() {
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
    if name.is_empty() {
        return None;
    }
    Some(split_value(name))
}

fn find_go_flag<'f>(flags: &'f [Flag], name: &[u8]) -> Option<&'f Flag> {
    flags
        .iter()
        .find(|flag| name == flag.name.as_bytes() || flag.short.is_some_and(|letter| name == [letter]))
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
            (Takes::Value, None) => return Some(flag.name),
            (Takes::Nothing, Some(_)) => self.unknown = true,
            (_, attached) => self.given.push((flag.name, attached)),
        }
        None
    }

    /// Parses clustered letters. Returns the last one's name if its value is the next argument.
    fn parse_letters(&mut self, letters: &'a [u8], flags: &[Flag]) -> Option<&'static str> {
        for (index, letter) in letters.iter().enumerate() {
            let Some(flag) = flags.iter().find(|flag| flag.short == Some(*letter)) else {
                self.unknown = true;
                return None;
            };
            let attached = Some(&letters[index + 1..]).filter(|rest| !rest.is_empty()).map(OsStr::from_bytes);
            match (flag.takes, attached) {
                (Takes::Nothing, _) => self.given.push((flag.name, None)),
                (Takes::Value, None) => return Some(flag.name),
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
