//! The OCI runtime shim: edits the files of `create`, `run` and `exec`, then becomes runc or crun.
//!
//! Called by the name `sublet-<share>`, it gives every container that named share. Which runtime it becomes is found here, too:
//! where its program is, whether its command line is runc's or crun's, and where it keeps its state.

mod argv;
mod create;
mod exec;
mod existing;

use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{anyhow, bail};
use nix::libc::{
    EACCES, ELOOP, ENAMETOOLONG, ENODEV, ENOENT, ENOTDIR, ESTALE, ETIMEDOUT, EXIT_FAILURE, EXIT_SUCCESS,
};

use sublet_core::config::{Config, WithoutShare};
use sublet_core::config_files::{ConfigError, ConfigFiles, ParsedFiles};
use sublet_core::fs::real_directory;
use sublet_core::log::{Level, Log};
use sublet_core::names::replace_ids;
use sublet_core::oci::containers_by_name;
use sublet_core::process::inheritance::effective_user;
use sublet_core::text::safe;
use sublet_core::{config, ledger, log, process};

pub use argv::{Command, CommandLine, Dialect, Exec, Global, Start, parse};

/// The share of a shim that is called `sublet-<share>`.
fn share_from_name(name: &Path) -> Option<String> {
    let name = name.file_name()?.to_string_lossy();
    let share = name.strip_prefix("sublet-")?;
    (!matches!(share, "" | "runtime" | "hook")).then(|| share.to_owned())
}

/// One invocation of the shim.
struct Call<'a> {
    /// Without the program's name.
    args: &'a [OsString],
    /// From the program's name, for all its containers.
    share: Option<String>,
    without_share: WithoutShare,
    low_level: LowLevel,
    files: &'a ParsedFiles<'a>,
    line: &'a CommandLine,
    log: &'a Log,
}

/// For people, who may ask for it before runc is installed. Engines never do.
const USAGE: &str = "\
The OCI runtime shim of sublet. Engines run it in place of runc or crun, with
the same command line. It gives containers with sublet.* annotations their share
of a GPU, and then becomes the low-level runtime ([runtime] low_level in
/etc/sublet/config.toml). Called by the name sublet-SHARE, it gives every
container the named share.

To configure an engine: sublet setup docker|podman|containerd|crio. The commands
for people: sublet --help; those of the low-level runtime: runc --help.
";

/// Runs the shim; `args` begin with the program's name. Returns its exit status.
pub fn main(args: &[OsString]) -> i32 {
    let (name, args) =
        args.split_first().map_or((Path::new(""), args), |(name, args)| (Path::new(name), args));
    if args.len() == 1 && (args[0] == "--help" || args[0] == "-h") {
        let _ = io::stdout().write_all(USAGE.as_bytes());
        return EXIT_SUCCESS;
    }
    let files = ConfigFiles::read();
    let files = files.parse();
    let runtime = files.runtime();
    // Engines write the log options in the same way for both runtimes.
    let found = find_low_level(runtime.as_ref().map_or(&[][..], |runtime| &runtime.low_level));
    let line = parse(args, found.as_ref().map_or(Dialect::Runc, |low_level| low_level.dialect));
    let without_share =
        runtime.as_ref().ok().and_then(|runtime| runtime.without_share).unwrap_or(WithoutShare::Warn);
    let own_log = runtime.as_ref().ok().and_then(|runtime| runtime.log.as_deref());
    let log = Log::new("sublet-runtime", line.global.log.as_deref(), line.global.log_json, own_log);
    log::trace_to(log.clone(), line.global.debug);
    let is_start = matches!(line.command, Command::Create(_) | Command::Run(_) | Command::Restore(_));
    let (line, low_level) = match runtime {
        Ok(_) => (line, found),
        Err(error) if is_start => (line, Err(error.into())),
        Err(error) => find_by_record(args, &error, &log),
    };
    let done = low_level.and_then(|low_level| {
        let share = share_from_name(name);
        dispatch(&Call { args, share, without_share, low_level, files: &files, line: &line, log: &log })
    });
    done.unwrap_or_else(|error| {
        log.write(Level::Error, &replace_ids(&describe(line.id.as_deref(), &error)));
        EXIT_FAILURE
    })
}

/// The first of `names` that exists and is not sublet itself.
fn find_low_level(names: &[String]) -> anyhow::Result<LowLevel> {
    let own = std::fs::metadata("/proc/self/exe").ok();
    find(names, std::env::var_os("PATH").as_deref(), own.as_ref())
}

/// Finds the runtime for a command on an existing container even if the configuration cannot be read, so that the
/// container can still be ended and examined: the runtime that has a record of it, otherwise the first one that is
/// installed.
fn find_by_record(
    args: &[OsString],
    error: &ConfigError,
    log: &Log,
) -> (CommandLine, anyhow::Result<LowLevel>) {
    log.write(Level::Info, &format!("{error}; going on with the runtime that was found"));
    let names = config::Runtime::default().low_level;
    let found: Vec<LowLevel> =
        names.iter().filter_map(|name| find_low_level(std::slice::from_ref(name)).ok()).collect();
    let host = Host::of(|name| std::env::var_os(name));
    let has_record = |low_level: &&LowLevel| {
        let root = parse(args, low_level.dialect).global.root;
        // In commands that do not concern sublet, the id is not parsed.
        let record = |word: &OsString| record_path(low_level.dialect, root.as_deref(), word.to_str()?, &host);
        args.iter().filter_map(record).any(|record| low_level.dialect.has_record(&record))
    };
    let low_level = found.iter().find(has_record).or(found.first()).cloned();
    let dialect = low_level.as_ref().map_or(Dialect::Runc, |low_level| low_level.dialect);
    (parse(args, dialect), low_level.map_or_else(|| find_low_level(&names), Ok))
}

/// The fault of both commands of criu's.
const NO_CHECKPOINT: &str = "of a container with a GPU share is not possible, because the GPU's state cannot be saved: \
                             recreate the container instead";

/// Every command except `delete` of a container with a share, and `kill` of one whose first thread has ended, ends by
/// becoming the low-level runtime.
fn dispatch(call: &Call<'_>) -> anyhow::Result<i32> {
    match &call.line.command {
        Command::Create(start) => create::create(call, start, false),
        Command::Run(start) => create::create(call, start, true),
        Command::Exec(exec) => exec::exec(call, exec),
        Command::Restore(start) => match create::find_request(call, start)? {
            Some(_) => bail!("restore {NO_CHECKPOINT}"),
            None => call.pass_on(),
        },
        Command::Checkpoint => match call.container() {
            Some((id, record)) if call.has_share(id, &record)? => bail!("checkpoint {NO_CHECKPOINT}"),
            _ => call.pass_on(),
        },
        Command::Update { resources } => existing::update(call, resources.as_deref()),
        Command::Kill { signal, all } => existing::kill(call, signal.as_deref(), *all),
        Command::Delete { force } => existing::delete(call, *force),
        Command::Other => call.pass_on(),
    }
}

/// The error with its container.
fn describe(id: Option<&OsStr>, error: &anyhow::Error) -> String {
    match id {
        Some(id) => format!("container {}: {error}", safe(&id.to_string_lossy())),
        None => error.to_string(),
    }
}

impl<'a> Call<'a> {
    /// Becomes the low-level runtime, with the arguments as they came.
    fn pass_on(&self) -> anyhow::Result<i32> {
        Err(self.become_low_level(self.args))
    }

    /// Returns only on failure. The standard library's `exec` also restores the one signal disposition that it changed
    /// at start, SIGPIPE. Everything else is inherited unchanged.
    fn become_low_level(&self, args: &[OsString]) -> anyhow::Error {
        self.cannot_run(&std::process::Command::new(&self.low_level.program).args(args).exec())
    }

    fn cannot_run(&self, error: &io::Error) -> anyhow::Error {
        anyhow!("cannot run {}: {error}", self.low_level.program.display())
    }

    /// The id and the record of the container that the command names; `None` if there can be no lease.
    fn container(&self) -> Option<(&'a str, PathBuf)> {
        let id = self.line.id.as_ref()?.to_str()?;
        Some((id, self.record(id)?))
    }

    fn record(&self, id: &str) -> Option<PathBuf> {
        let (dialect, root) = (self.low_level.dialect, self.line.global.root.as_deref());
        record_path(dialect, root, id, &Host::of(|name| std::env::var_os(name)))
    }

    fn has_share(&self, id: &str, record: &Path) -> anyhow::Result<bool> {
        Ok(exec::may_have_share(record)?
            && exec::find_share(effective_user(), id, record, &self.files.config())?.is_some())
    }

    /// The configuration, if there are leases at all. If it is invalid, `delete` goes on without it: this must not keep
    /// containers from ending, most of which have no share, and the next command sees that they have ended.
    fn config_with_leases(&self) -> Option<Config> {
        match self.files.config() {
            Ok(config) => ledger::is_there(&config.state_dir).then_some(config),
            Err(error) => {
                self.warn(&format!("{error}; going on without it"));
                None
            }
        }
    }

    fn warn(&self, message: &str) {
        self.log.write(Level::Warning, message);
    }
}

/// Where names are looked up when there is no PATH.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How many links the kernel follows (`path_resolution(7)`).
const MOST_LINKS: usize = 40;

/// Errors for which execvp(3) looks further.
const SKIPPED: [i32; 8] = [EACCES, ELOOP, ENAMETOOLONG, ENODEV, ENOENT, ENOTDIR, ESTALE, ETIMEDOUT];

/// A low-level runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LowLevel {
    /// Its program.
    pub program: PathBuf,
    /// Its command line.
    pub dialect: Dialect,
}

/// The first of `names` that exists and is not sublet itself, looked up in `path`.
fn find(names: &[String], path: Option<&OsStr>, own: Option<&Metadata>) -> anyhow::Result<LowLevel> {
    let mut met_ourselves = false;
    for name in names {
        for program in candidates(name, path) {
            let metadata = match std::fs::metadata(&program) {
                Ok(metadata) if metadata.is_file() && metadata.mode() & 0o111 != 0 => Some(metadata),
                Ok(_) => continue,
                // As execvp(3) goes on to the next directory of PATH.
                Err(error) if error.raw_os_error().is_some_and(|errno| SKIPPED.contains(&errno)) => continue,
                // Only running it shows. Another runtime would not know this one's containers.
                Err(_) => None,
            };
            if is_sublet(&program, metadata.as_ref(), own) {
                met_ourselves = true;
                continue;
            }
            return Ok(LowLevel { dialect: detect_dialect(&program), program });
        }
    }
    bail!(
        "missing {}: no executable {} found{}; install runc or crun, or set [runtime] low_level",
        names.first().map_or_else(|| "runc".to_owned(), |name| safe(name)),
        safe(&names.join(" or ")),
        if met_ourselves { " but sublet itself" } else { "" }
    )
}

/// The paths that `name` may mean. Relative directories in PATH are skipped.
fn candidates(name: &str, path: Option<&OsStr>) -> Vec<PathBuf> {
    if name.contains('/') {
        return vec![PathBuf::from(name)];
    }
    let path = path.filter(|path| !path.is_empty()).unwrap_or(OsStr::new(DEFAULT_PATH));
    std::env::split_paths(path).filter(|dir| dir.is_absolute()).map(|dir| dir.join(name)).collect()
}

/// Whether running `program` would run this program again, without end.
fn is_sublet(program: &Path, metadata: Option<&Metadata>, own: Option<&Metadata>) -> bool {
    let files = own.zip(metadata);
    let same = files.is_some_and(|(own, found)| (own.dev(), own.ino()) == (found.dev(), found.ino()));
    same || file_name(program).starts_with("sublet-")
}

/// Decided by the name of the program, or of the file that it links to: distributions link `runc` to crun.
fn detect_dialect(program: &Path) -> Dialect {
    let is_crun = |path: &Path| {
        let name = file_name(path);
        name.contains("crun") || name.contains("krun")
    };
    let mut linked = program.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(target) = std::fs::read_link(&linked) else { break };
        linked = linked.with_file_name(target);
    }
    if is_crun(program) || is_crun(&linked) { Dialect::Crun } else { Dialect::Runc }
}

fn file_name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

/// The inputs of the runtimes' default state directory.
#[derive(Debug, Default)]
struct Host {
    xdg_runtime_dir: Option<OsString>,
    user: Option<OsString>,
    root: bool,
    user_namespace: bool,
}

impl Host {
    /// Of a process of the same user with these variables.
    fn of(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        Self {
            xdg_runtime_dir: variable("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()),
            user: variable("USER"),
            root: effective_user() == 0,
            user_namespace: process::is_nested(),
        }
    }

    /// runc's rule (`shouldHonorXDGRuntimeDir` in `rootless_linux.go`) and crun's (`get_run_directory` in
    /// libcrun/status.c, which honours `XDG_RUNTIME_DIR` for root too).
    fn state_dir(&self, dialect: Dialect) -> PathBuf {
        let not_named_root = self.user.as_deref() != Some(OsStr::new("root"));
        let (name, honoured) = match dialect {
            Dialect::Crun => ("crun", true),
            Dialect::Runc => ("runc", !self.root || self.user_namespace && not_named_root),
        };
        let base = self.xdg_runtime_dir.as_ref().filter(|_| honoured);
        base.map_or_else(|| PathBuf::from("/run"), PathBuf::from).join(name)
    }
}

/// Whether the runtime with process id `pid` is crun, by the name under which it was started.
pub(crate) fn is_crun(pid: i32) -> bool {
    let args = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let program = args.split(|byte| *byte == 0).next().unwrap_or_default();
    detect_dialect(Path::new(OsStr::from_bytes(program))) == Dialect::Crun
}

/// The record of container `id` that the runtime with process id `pid` keeps; `None` if it is not found.
pub(crate) fn find_record(pid: i32, id: &str) -> Option<PathBuf> {
    // The strings of a file of /proc, each ended by a NUL byte.
    let read = |file: &str| -> Vec<OsString> {
        let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let text = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
        text.split(|byte| *byte == 0).map(|part| OsStr::from_bytes(part).to_owned()).collect()
    };
    let (args, environment) = (read("cmdline"), read("environ"));
    // /proc/PID/exe is not used, because crun runs a copy of itself that has no path.
    let (program, args) = args.split_first()?;
    let dialect = detect_dialect(Path::new(program));
    let variable = |name: &str| {
        let value = |entry: &OsString| {
            let rest = entry.as_bytes().strip_prefix(name.as_bytes())?;
            rest.strip_prefix(b"=").map(|value| OsStr::from_bytes(value).to_owned())
        };
        environment.iter().find_map(value)
    };
    let root = parse(args, dialect).global.root;
    record_path(dialect, root.as_deref(), id, &Host::of(variable)).filter(|record| record.is_dir())
}

/// The directory in which `dialect` keeps the state of container `id`: ROOT/ID, absolute.
///
/// `None` for ids that are no single path component: both runtimes refuse those.
fn record_path(dialect: Dialect, root: Option<&Path>, id: &str, host: &Host) -> Option<PathBuf> {
    if id.is_empty() || id.contains(['/', '\0']) || matches!(id, "." | "..") {
        return None;
    }
    let root = root.map_or_else(|| host.state_dir(dialect), Path::to_owned);
    Some(resolve_existing(&std::path::absolute(dialect.interpret_path(&root)).ok()?).join(id))
}

impl Dialect {
    /// Whether `record` is a record of this runtime.
    fn has_record(self, record: &Path) -> bool {
        record.join(if self == Self::Crun { "status" } else { "state.json" }).is_file()
    }

    /// `path` as the runtime understands it on its command line. runc calls Go's `filepath.Abs`, which resolves `..`
    /// and an empty path by the text. crun leaves this to the kernel.
    fn interpret_path(self, path: &Path) -> PathBuf {
        if self == Self::Crun {
            return path.to_owned();
        }
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        std::path::absolute(path).unwrap_or_default().components().fold(PathBuf::new(), |mut above, part| {
            if part == Component::ParentDir {
                above.pop();
            } else {
                above.push(part);
            }
            above
        })
    }
}

/// `path` without links, so that two names of a directory become one. The runtime creates missing components as they
/// are written.
fn resolve_existing(path: &Path) -> PathBuf {
    let real = |above: &Path| Some(real_directory(above).ok()?.join(path.strip_prefix(above).ok()?));
    path.ancestors().find_map(real).unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_is_where_the_runtimes_command_line_says() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("c1")).unwrap();
        // A waiting shell with additional arguments that it does not read.
        let mut runtime = std::process::Command::new("/bin/sh")
            .args(["-c", "echo up; read wait", "--root"])
            .arg(dir.path())
            .args(["create", "c1"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // A process that was just started has no command line yet.
        std::io::Read::read_exact(runtime.stdout.as_mut().unwrap(), &mut [0; 3]).unwrap();
        let pid = i32::try_from(runtime.id()).unwrap();
        assert_eq!(find_record(pid, "c1"), Some(dir.path().join("c1")));
        assert_eq!(find_record(pid, "c2"), None, "there is none");
        assert_eq!(find_record(pid, "../c1"), None);
        drop(runtime.stdin.take());
        runtime.wait().unwrap();
        assert_eq!(find_record(pid, "c1"), None, "the runtime is gone");
    }

    #[test]
    fn a_name_may_mean_a_share() {
        let share = |name: &str| share_from_name(Path::new(name));
        assert_eq!(share("sublet-quarter"), Some("quarter".into()));
        assert_eq!(share("/x/sublet-a-b"), Some("a-b".into()));
        for other in ["/usr/bin/sublet-runtime", "sublet", "sublet-", "sublet-hook", "nvidia", "", "/"] {
            assert_eq!(share(other), None, "{other}");
        }
    }

    #[test]
    fn errors_name_the_container() {
        let error = anyhow!("checkpoint {NO_CHECKPOINT}");
        assert_eq!(
            describe(Some("c\u{1b}1".as_ref()), &error),
            "container c\\u{1b}1: checkpoint of a container with a GPU share is not possible, because the \
             GPU's state cannot be saved: recreate the container instead"
        );
    }
}

#[cfg(test)]
#[path = "low_level_tests.rs"]
mod low_level_tests;
