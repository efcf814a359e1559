//! The OCI runtime shim: edits the files of `create`, `run` and `exec`, then becomes runc or crun.
//!
//! Called by the name `sublet-<share>`, it gives every container that named share.

mod argv;
mod checkpoint;
mod create;
mod delete;
mod exec;
mod flags;
mod kill;
mod low_level;
mod running_runtime;
mod runtime_child;
mod update;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

use sublet_core::admit::{self, AdmitError, EnterError};
use sublet_core::config::{self, Config, WithoutShare};
use sublet_core::config_files::{ConfigError, ConfigFiles, ParsedFiles};
use sublet_core::ledger;
use sublet_core::oci::hooks::BadHooks;
use sublet_core::oci::{FileError, SpecError};
use sublet_core::process::inheritance::effective_user;

use crate::status::{FAILURE, SUCCESS};
pub use argv::{Command, CommandLine, Delete, Exec, Global, Kill, Start, Update, parse};
pub use flags::Dialect;
use low_level::{LowLevel, MissingRuntime};
pub(crate) use running_runtime::find_record;
use sublet_core::log::{self, Level, Log};
use sublet_core::oci::containers_by_name;

/// Why a command is not executed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RuntimeError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No runc or crun.
    #[error(transparent)]
    LowLevel(#[from] MissingRuntime),
    /// It gets no share.
    #[error(transparent)]
    Admit(#[from] AdmitError),
    /// The share of a running container cannot be determined.
    #[error(transparent)]
    Enter(#[from] EnterError),
    /// The process file of exec.
    #[error("the process file {path} cannot be used: {why}")]
    ProcessFile {
        /// Which.
        path: String,
        /// Why not.
        why: String,
    },
    /// Its edited copy.
    #[error("the process file cannot be copied: {0}")]
    Copy(io::Error),
    /// The kernel refuses.
    #[error(
        "the process cannot be kept away from the GPU, which `[mps] exec_without_daemon` asks for: \
         seccomp: {0}"
    )]
    NoFilter(io::Error),
    /// crun, and no process file.
    #[error(
        "{0}; and crun takes an environment without a GPU only on its command line, which every user can read: \
         pass the process with --process, or its variables with --env"
    )]
    NoEnvironment(AdmitError),
    /// An unknown option, of a later version of the runtime.
    #[error(
        "exec has an option that this sublet does not know, and one of the words after it is a container \
         with a share of a GPU: pass the process with --process, or leave the option out"
    )]
    UnknownOption,
    /// A name of a container with a share is not UTF-8, so it cannot be written as JSON.
    #[error("{name} {path} is not UTF-8: give the container with a share a directory with another name")]
    NotUtf8 {
        /// Of which option or key.
        name: &'static str,
        /// The path, as far as it can be shown.
        path: String,
    },
    /// config.json or the process file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The content of these files.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// It asks for a share, and its id is unknown.
    #[error(
        "the command line does not name one container: exactly one id of letters, digits and . _ + - is \
         needed"
    )]
    NoId,
    /// A path that the spec or the command line names.
    #[error("{name} {path} cannot be used: {source}")]
    Path {
        /// Of which option or key.
        name: &'static str,
        /// The path as given.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// `root` of config.json.
    #[error(
        "config.json has no root.path, which the OCI runtime specification requires: recreate the container"
    )]
    NoRoot,
    /// `hooks` of config.json.
    #[error(transparent)]
    Hooks(#[from] BadHooks),
    /// Without it the lease would not be bound.
    #[error(
        "sublet-hook is missing, and rootless containers need it: install it as \
         /usr/libexec/sublet/sublet-hook"
    )]
    NoHook,
    /// This process's /proc entry.
    #[error("cannot read when this process started (is /proc mounted?): {0}")]
    Process(io::Error),
    /// checkpoint or restore.
    #[error(
        "{0} of a container with a GPU share is not possible, because the GPU's state cannot be saved: \
         recreate the container instead"
    )]
    NoCheckpoint(&'static str),
    /// update.
    #[error(
        "this update would take the container's GPU away: the engine passes a list of devices with it that lacks the \
         share's, and crun closes all others. Recreate the container with these settings, or put runc first in \
         `[runtime] low_level`, which leaves devices as they are"
    )]
    Devices,
    /// `[runtime] without_share = "refuse"`.
    #[error(
        "no sublet.* annotation reached the runtime and no rule gives the container a share, and [runtime] without_share \
         refuses such containers: start it with annotations by a client that passes them on (Docker's API 1.43 or later), \
         or with another runtime"
    )]
    WithoutShare,
    /// The low-level runtime.
    #[error("cannot run {program}: {source}")]
    Exec {
        /// Its program.
        program: String,
        /// Why not.
        source: io::Error,
    },
}

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
    global: &'a Global,
    log: &'a Log,
}

/// For people, who may ask for it before runc is installed. Engines never do.
const USAGE: &str = "\
The OCI runtime shim of sublet. Engines run it in place of runc or crun, with the same command line. It gives
containers with sublet.* annotations their share of a GPU, and then becomes the low-level runtime ([runtime]
low_level in /etc/sublet/config.toml). Called by the name sublet-SHARE, it gives every container the named share.

`sublet setup docker|podman|containerd|crio` configures an engine to use it. `sublet --help` lists the commands for
people, `runc --help` those of the low-level runtime.
";

/// Runs the shim; `args` begin with the program's name.
pub fn main(args: impl Iterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.collect();
    let (name, args) =
        args.split_first().map_or((Path::new(""), args.as_slice()), |(name, args)| (Path::new(name), args));
    if args.len() == 1 && (args[0] == "--help" || args[0] == "-h") {
        let _ = io::stdout().write_all(USAGE.as_bytes());
        return SUCCESS;
    }
    let files = ConfigFiles::read();
    let files = files.parse();
    let runtime = files.runtime();
    // Engines write the log options in the same way for both runtimes.
    let names = runtime.as_ref().map_or(&[][..], |runtime| &runtime.low_level);
    let found = find(names);
    let line = parse(args, found.as_ref().map_or(Dialect::Runc, |low_level| low_level.dialect));
    let without_share =
        runtime.as_ref().ok().and_then(|runtime| runtime.without_share).unwrap_or(WithoutShare::Warn);
    let own_log = runtime.as_ref().ok().and_then(|runtime| runtime.log.as_deref());
    let log = Log::new("sublet-runtime", line.global.log.as_deref(), line.global.log_json, own_log);
    log::trace_to(log.clone(), line.global.debug);
    let (line, low_level) = match runtime {
        Ok(_) => (line, found.map_err(RuntimeError::from)),
        Err(error) if line.command.is_start() => (line, Err(error.into())),
        Err(error) => find_by_record(args, &error, &log),
    };
    let done = low_level.and_then(|low_level| {
        let (share, files, global) = (share_from_name(name), &files, &line.global);
        let call = Call { args, share, without_share, low_level, files, global, log: &log };
        dispatch(&call, &line.command)
    });
    done.unwrap_or_else(|error| {
        log.write(Level::Error, &describe(&line.command, &error));
        FAILURE
    })
}

fn find(names: &[String]) -> Result<LowLevel, MissingRuntime> {
    let own = std::fs::metadata("/proc/self/exe").ok();
    low_level::find(names, std::env::var_os("PATH").as_deref(), own.as_ref())
}

/// Finds the runtime for a command on an existing container even if the configuration cannot be read, so that the
/// container can still be ended and examined: the runtime that has a record of it, otherwise the first one that is
/// installed.
fn find_by_record(
    args: &[OsString],
    error: &ConfigError,
    log: &Log,
) -> (CommandLine, Result<LowLevel, RuntimeError>) {
    log.write(Level::Info, &format!("{error}; going on with the runtime that was found"));
    let names = config::Runtime::default().low_level;
    let found: Vec<LowLevel> =
        names.iter().filter_map(|name| find(std::slice::from_ref(name)).ok()).collect();
    let host = low_level::Host::current();
    let has_record = |low_level: &&LowLevel| {
        let root = parse(args, low_level.dialect).global.root;
        // In commands that do not concern sublet, the id is not parsed.
        let mut records = args.iter().filter_map(|word| {
            low_level::record_path(low_level.dialect, root.as_deref(), word.to_str()?, &host)
        });
        records.any(|record| low_level.dialect.has_record(&record))
    };
    let low_level = found.iter().find(has_record).or(found.first()).cloned();
    let dialect = low_level.as_ref().map_or(Dialect::Runc, |low_level| low_level.dialect);
    (parse(args, dialect), low_level.map_or_else(|| find(&names).map_err(RuntimeError::from), Ok))
}

/// Every command except `delete` of a container with a share, and `kill` of one whose first thread has ended, ends by
/// becoming the low-level runtime.
fn dispatch(call: &Call<'_>, command: &Command) -> Result<u8, RuntimeError> {
    match command {
        Command::Create(start) => create::create(call, start, create::Kind::Create),
        Command::Run(start) => create::create(call, start, create::Kind::Run),
        Command::Exec(exec) => exec::exec(call, exec),
        Command::Restore(start) => checkpoint::restore(call, start),
        Command::Checkpoint(_) => checkpoint::checkpoint(call, call.container(command)),
        Command::Update(changed) => update::update(call, changed, call.container(command)),
        Command::Kill(kill) => kill::kill(call, kill, call.container(command)),
        Command::Delete(delete) => delete::delete(call, delete.force, call.container(command)),
        Command::Other => call.pass_on(),
    }
}

/// The error with its container.
fn describe(command: &Command, error: &RuntimeError) -> String {
    match command.id() {
        Some(id) => format!("container {}: {error}", sublet_core::text::safe(&id.to_string_lossy())),
        None => error.to_string(),
    }
}

impl Call<'_> {
    /// Becomes the low-level runtime, with the arguments as they came.
    fn pass_on(&self) -> Result<u8, RuntimeError> {
        Err(self.become_low_level(self.args))
    }

    /// Returns only on failure. The standard library's `exec` also restores the one signal disposition that it changed
    /// at start, SIGPIPE. Everything else is inherited unchanged.
    fn become_low_level(&self, args: &[OsString]) -> RuntimeError {
        let source = std::process::Command::new(&self.low_level.program).args(args).exec();
        self.cannot_run(source)
    }

    fn cannot_run(&self, source: io::Error) -> RuntimeError {
        RuntimeError::Exec { program: self.low_level.program.display().to_string(), source }
    }

    /// The id and the record of the container that `command` names; `None` if there can be no lease.
    fn container<'c>(&self, command: &'c Command) -> Option<(&'c str, PathBuf)> {
        let id = command.id()?.to_str()?;
        Some((id, self.record(id)?))
    }

    fn record(&self, id: &str) -> Option<PathBuf> {
        low_level::record_path(
            self.low_level.dialect,
            self.global.root.as_deref(),
            id,
            &low_level::Host::current(),
        )
    }

    fn has_share(&self, id: &str, record: &Path) -> Result<bool, RuntimeError> {
        Ok(admit::may_have_share(record)?
            && admit::find_share(effective_user(), id, record, &self.files.config())?.is_some())
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let error = RuntimeError::NoCheckpoint("checkpoint");
        assert_eq!(
            describe(&Command::Checkpoint(Some("c\u{1b}1".into())), &error),
            "container c\\u{1b}1: checkpoint of a container with a GPU share is not possible, because the \
             GPU's state cannot be saved: recreate the container instead"
        );
    }
}
