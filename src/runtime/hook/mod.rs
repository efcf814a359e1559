//! The hook's stages, for engines without the shim, and for `run`, which deletes the container without another command.
//!
//! A stage trusts only its standard input, because the working directory and the environment of a hook may
//! be the image's (CVE-2025-23266). The exception is precreate in a user namespace: Podman runs it in the container's
//! bundle, and its storage beside that is read, but only if standard input names the same container.

#[cfg(feature = "fixtures")]
pub mod fuzzing;
mod precreate;
mod prestart;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use nix::libc::{EXIT_FAILURE, EXIT_SUCCESS};
use serde::Deserialize;

use crate::shim;
use sublet_core::admit::{self, AdmitError, Engine, Leases};
use sublet_core::bounded_input;
use sublet_core::config::Config;
use sublet_core::config_files::{self, ConfigFiles};
use sublet_core::fs::{parse_json, under};
use sublet_core::ledger::{Binding, Init, LEASE_ANNOTATION, LEASE_RECORD_ANNOTATION, LeaseId};
use sublet_core::log::{self, Level, Log, one_line};
use sublet_core::names::replace_ids;
use sublet_core::oci::cdi::{self, Asked};
use sublet_core::process::confine::{self, Rights, Side};
use sublet_core::process::{Process, sublet};
use sublet_core::text::{safe, safe_path};
use sublet_core::{mps, oci};

/// How long the runtime may take to write the state.
const INPUT_TIMEOUT: Duration = Duration::from_secs(5);

/// For people. Engines never ask for it.
const USAGE: &str = "\
The OCI hook of sublet. Engines run it as sublet-hook STAGE, with the
container's state on standard input. (precreate reads config.json there, and
prints it with the edits.)

  precreate      Podman, before the container exists: take a lease and edit
  createRuntime  bind the lease that precreate took, or do as prestart does
  prestart       take a lease and mount the share into the container
  cdi            createRuntime for a CDI device: the share and the GPU follow
  poststop       end what the container has left, free the lease

To configure Podman: sublet setup podman. Commands for people: sublet --help.
";

/// Runs the hook; `args` begin with the program's name. Returns its exit status.
pub fn main(args: &[OsString]) -> i32 {
    let args: Vec<String> = args.iter().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    // Neither is a stage.
    let answer = match args.first().map(String::as_str) {
        Some("--help" | "-h") => Some(USAGE),
        Some("--version" | "-V") => Some(concat!("sublet-hook ", env!("CARGO_PKG_VERSION"), "\n")),
        _ => None,
    };
    if let Some(text) = answer {
        let _ = io::stdout().write_all(text.as_bytes());
        return EXIT_SUCCESS;
    }
    confine::clean();
    let own = ConfigFiles::read().parse().runtime().ok().and_then(|runtime| runtime.log);
    let log = Log::new("sublet-hook", None, false, own.as_deref());
    log::trace_to(log.clone(), false);
    // Done here, because the process that does the work may not examine other processes.
    let is_start = args.first().is_some_and(|stage| stage != "poststop");
    let engine = Engine::of(nix::unistd::getppid().as_raw()).filter(|_| is_start);
    let said = |done: anyhow::Result<()>| {
        done.inspect_err(|error| report(&log, Level::Error, &replace_ids(&error.to_string()))).is_ok()
    };
    let done = match confine::fork_worker(rights(&args), allowed_command) {
        Ok(Side::Worker) => said(run(&args, engine.as_ref(), &log)),
        Ok(Side::Waited(done)) => done,
        Err(error) => said(Err(anyhow!("the hook did not finish: {error}"))),
    };
    if done { EXIT_SUCCESS } else { EXIT_FAILURE }
}

/// The socket on which system loggers listen, including systemd's journal (syslog(3)).
const SOCKET: &str = "/dev/log";

/// Writes one line to sublet's log, and to the system's, if a logger listens: Podman and crun discard the output of hooks.
/// Does not wait if its queue is full.
fn report(log: &Log, level: Level, line: &str) {
    log.write(level, line);
    if let Err(error) = send_to_logger(Path::new(SOCKET), level, line) {
        tracing::debug!("{SOCKET}: {error}");
    }
}

fn send_to_logger(socket: &Path, level: Level, message: &str) -> io::Result<()> {
    // Facility "user" is 1; severities (RFC 5424): 3 is error, 4 warning, 6 informational.
    let priority = 8 + match level {
        Level::Error => 3,
        Level::Warning => 4,
        Level::Info | Level::Debug => 6,
    };
    let line = format!("<{priority}>sublet-hook[{}]: {}", std::process::id(), one_line(message));
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.send_to(line.as_bytes(), socket).map(drop)
}

/// The rights that the stage may need. Those that turn out to be superfluous are dropped later.
fn rights(args: &[String]) -> Rights {
    match args.first().map(String::as_str) {
        Some("createRuntime" | "prestart" | cdi::STAGE) => Rights::Container,
        Some("precreate") => Rights::Share,
        _ => Rights::Ledger,
    }
}

fn run(args: &[String], engine: Option<&Engine>, log: &Log) -> anyhow::Result<()> {
    let stage = args.first().map(String::as_str).unwrap_or_default();
    let asked = || Asked::parse(args[1..].iter().map(String::as_str));
    match stage {
        "precreate" => precreate::precreate(engine, log),
        "createRuntime" => create_runtime(&read_state()?, engine, log),
        "prestart" => prestart::prestart(&read_state()?, None, engine, log),
        cdi::STAGE => {
            let container = read_state()?;
            let asked = asked().map_err(|error| anyhow!("container {}: {error}", safe(&container.id)))?;
            prestart::prestart(&container, Some(&asked), engine, log)
        }
        // For containers with CDI devices, with the same arguments as before their start.
        "poststop" => poststop(&read_state()?, asked().is_ok()),
        _ => bail!(
            "unknown stage {}: the first argument has to be precreate, prestart, createRuntime, poststop or cdi",
            safe(stage)
        ),
    }
}

/// The command that `words` ask for, with a clean environment. A hook's parent process runs it: the hook's own process may
/// start none ([`sublet_core::process::confine`]).
fn allowed_command(words: &[&str]) -> Option<std::process::Command> {
    match words {
        ["sublet", arguments @ ..] if is_sublet_command(arguments) => {
            Some(sublet::command(&sublet::program(), arguments))
        }
        ["nvidia-cuda-mps-control", key] => mps::control_command(key),
        ["systemctl", arguments @ ..] => oci::systemctl(arguments),
        _ => None,
    }
}

/// Whether these are arguments of a `sublet` command that sublet's other programs run.
fn is_sublet_command(arguments: &[&str]) -> bool {
    match arguments {
        ["refresh", "--quiet"] | ["mig", "make" | "clear"] => true,
        ["gc", "--deleted", lease] => LeaseId::parse(lease).is_some(),
        ["mps", "start" | "rest" | "lower", key] => mps::is_key(key),
        ["mps", "stop", word, key] => *word == mps::IF_THERE && mps::is_key(key),
        _ => false,
    }
}

/// Longest state that is read, far longer than any engine's annotations.
const LONGEST_STATE: usize = 1 << 20;

/// The part that sublet needs of the container's state, as the OCI runtime gives it to hooks on standard input (runtime-spec,
/// runtime.md, "State"). Untrusted: bounded in size and time.
#[derive(Debug, Deserialize)]
struct State {
    /// The container.
    id: String,
    /// The container's first process in this process's PID namespace; 0 or absent if there is none.
    pid: Option<i32>,
    /// The bundle.
    bundle: Option<PathBuf>,
    /// Must be one of the specification's words. Whether the container has really ended is checked by other means.
    status: Status,
    annotations: Option<std::collections::BTreeMap<String, String>>,
}

/// Where a container is in its life (runtime-spec, runtime.md, "State").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Creating,
    Created,
    Running,
    Stopped,
}

impl State {
    /// Reads it from JSON.
    ///
    /// # Errors
    /// No JSON object with an id and a known status.
    fn parse(text: &[u8]) -> anyhow::Result<Self> {
        ensure!(!text.trim_ascii().is_empty(), "it is empty");
        let state: Self = parse_json(text)
            .map_err(|error| anyhow!(sublet_core::parse_errors::plain(&error.to_string(), None)))?;
        ensure!(!state.id.is_empty(), "its id is empty");
        Ok(state)
    }

    /// The annotations as the runtime reports them.
    fn annotations(&self) -> impl Iterator<Item = (&String, &String)> {
        self.annotations.iter().flatten()
    }

    /// Whether it has annotations for sublet.
    ///
    /// This is no decision that the container asks for a share ([`sublet_core::admit::RequestSource::of`]): that needs
    /// config.json, because a CDI device asks without annotations and a pause container has its pod's annotations.
    fn has_sublet_annotations(&self) -> bool {
        self.annotations.as_ref().is_some_and(sublet_core::request::has_sublet_annotations)
    }

    /// The annotation that holds the lease itself; empty without one.
    fn lease_record(&self) -> &str {
        self.annotations.as_ref().and_then(|all| all.get(LEASE_RECORD_ANNOTATION)).map_or("", String::as_str)
    }

    /// The lease in its annotations.
    ///
    /// # Errors
    /// The annotation's text, made safe, if it is not a lease id.
    fn lease(&self) -> Result<Option<LeaseId>, String> {
        let annotation = self.annotations.as_ref().and_then(|annotations| annotations.get(LEASE_ANNOTATION));
        annotation.map(|text| LeaseId::parse(text).ok_or_else(|| safe(text))).transpose()
    }
}

/// The container exists. Binds the lease that was taken for it before, or gives it its share now.
fn create_runtime(state: &State, engine: Option<&Engine>, log: &Log) -> anyhow::Result<()> {
    match parse_lease(state)? {
        Some(lease) => {
            confine::drop_rights(Rights::Ledger);
            bind(state, &lease, log)
        }
        None => prestart::prestart(state, None, engine, log),
    }
}

/// The container's state from standard input.
fn read_state() -> anyhow::Result<State> {
    let text = bounded_input::read(std::io::stdin(), None, LONGEST_STATE, Instant::now() + INPUT_TIMEOUT);
    let state = text.map_err(anyhow::Error::from).and_then(|text| State::parse(&text));
    state.map_err(|error| anyhow!("the container's state on standard input: {error}"))
}

/// The lease that the container's annotation names.
fn parse_lease(state: &State) -> anyhow::Result<Option<LeaseId>> {
    state.lease().map_err(|lease| {
        anyhow!("container {}: sublet.lease={lease} is not a lease id of 16 hex digits", safe(&state.id))
    })
}

fn not_ended(state: &State, error: &AdmitError) -> anyhow::Error {
    let advice = "the next sublet command after its end frees its lease";
    anyhow!("container {}: {error}; {advice}", safe(&state.id))
}

/// Frees the lease of the ended container: the one that its annotation names, or that a hook took for it (prestart,
/// `by_cdi`).
fn poststop(state: &State, by_cdi: bool) -> anyhow::Result<()> {
    match parse_lease(state)? {
        Some(lease) => {
            let config = config_files::load()?;
            let leases = Leases::of(&config);
            leases.end(&lease).map_err(|error| not_ended(state, &error))?;
            leases.clear_after(state.lease_record());
            Ok(())
        }
        None if by_cdi || state.has_sublet_annotations() => prestart::free_lease(state),
        None => Ok(()),
    }
}

/// Binds `lease` to the container of `state`. A failure keeps the container from starting, because without a lease its
/// GPU use would not be booked.
fn bind(state: &State, lease: &LeaseId, log: &Log) -> anyhow::Result<()> {
    let config = config_files::load()?;
    let leases = Leases::of(&config);
    let id = safe(&state.id);
    let process = state.pid.filter(|pid| *pid > 0).and_then(Process::find).filter(Process::is_alive);
    let unbound = "so the lease cannot be bound to it";
    let process = process
        .with_context(|| format!("container {id}: its state names no process that runs (pid), {unbound}"))?;
    let bundle = state.bundle.as_ref().and_then(|bundle| bundle.canonicalize().ok());
    let bundle = bundle
        .with_context(|| format!("container {id}: its state names no bundle that exists, {unbound}"))?;
    let record = shim::find_record(confine::engine(), &state.id).unwrap_or_default();
    let init = Init::of(process).map_err(|error| {
        anyhow!("container {id}: the cgroup of its process cannot be read, {unbound}: {error}")
    })?;
    let binding = Binding { id: state.id.clone(), bundle, record, init };
    leases.bind(lease, &binding).map_err(|error| {
        admit::clear_refused(&binding.bundle, &config);
        anyhow!("container {id}: {error}")
    })?;
    if let Some(warning) = lost_groups(state, &config) {
        report(log, Level::Warning, &format!("container {id}: {warning}"));
        leases.report_warning(&state.id, &warning);
    }
    Ok(())
}

/// The warning if a user's container needs the groups of its starter for the nodes, and its runtime does not leave it these.
/// precreate does not know the runtime.
fn lost_groups(state: &State, config: &Config) -> Option<String> {
    let asks = state.annotations.as_ref()?.contains_key(oci::KEEP_GROUPS) && admit::is_remote(config);
    let node = under(&config.driver.root, "/dev/nvidiactl");
    let mode = asks.then(|| std::fs::metadata(&node).ok())??.mode() & 0o777;
    (mode & 0o006 != 0o006 && !shim::is_crun(confine::engine())).then(|| {
        format!(
            "device node {} has mode {mode:04o}, and only crun keeps the groups of `--group-add keep-groups`: CUDA will \
             find no GPU; start it with crun (docs/rootless.md)",
            safe_path(&node)
        )
    })
}

#[cfg(test)]
mod allowed_command_tests {
    use super::*;

    #[test]
    fn only_the_commands_of_hooks_are_run() {
        let words: [&[&str]; 16] = [
            &[],
            &["sh", "-c", "true"],
            &["/bin/true"],
            &["sublet"],
            &["sublet", "gc"],
            &["sublet", "gc", "--deleted", "--rebuild"],
            &["sublet", "gc", "--rebuild"],
            &["sublet", "refresh", "--quiet", "--boot"],
            &["sublet", "mps", "start", "--help"],
            &["sublet", "mps", "stop", "--if-there", "../x"],
            &["sublet", "mig", "apply", "x"],
            &["nvidia-cuda-mps-control", "../../tmp"],
            &["systemctl", "stop", "docker"],
            &["systemctl", "show", "--property=ControlGroup", "--value", "-H", "host"],
            &["systemctl", "set-property", "--runtime", "--", "x.scope", "ExecStart=/bin/true"],
            &["systemctl", "set-property", "--runtime", "--", "x.scope", "DeviceAllow=/dev/sda rw"],
        ];
        for words in words {
            assert!(allowed_command(words).is_none(), "{words:?}");
        }
        for words in [
            &["sublet", "refresh", "--quiet"][..],
            &["sublet", "gc", "--deleted", "0123456789abcdef"],
            &["sublet", "mps", "start", "GPU-0"],
            &["sublet", "mps", "lower", "GPU-0"],
            &["sublet", "mps", "stop", "--if-there", "GPU-0"],
            &["systemctl", "show", "--property=ControlGroup", "--value", "--", "x.scope"],
            &["systemctl", "set-property", "--runtime", "--", "x.scope", "DeviceAllow=/dev/char/195:0 rw"],
        ] {
            assert!(allowed_command(words).is_some(), "{words:?}");
        }
    }
}

#[cfg(test)]
mod state_tests {
    use proptest::prelude::*;

    use super::*;

    fn lease_of(text: &str) -> Result<Option<LeaseId>, String> {
        State::parse(text.as_bytes()).unwrap().lease()
    }

    #[test]
    fn finds_the_lease_in_the_state_of_runc_and_podman() {
        let runc = r#"{"ociVersion":"1.0.2-dev","id":"c1","status":"stopped","bundle":"/b",
                       "annotations":{"a":"b","sublet.lease":"0123456789abcdef"}}"#;
        assert_eq!(lease_of(runc).unwrap().unwrap().as_str(), "0123456789abcdef");
        assert_eq!(lease_of(r#"{"id":"c","status":"stopped","annotations":{}}"#), Ok(None));
        assert_eq!(lease_of(r#"{"id":"c","status":"stopped","annotations":null}"#), Ok(None));
        assert_eq!(lease_of(r#"{"id":"c","pid":0,"status":"running"}"#), Ok(None));
    }

    #[test]
    fn refuses_a_lease_that_is_none() {
        let state = r#"{"id":"c","status":"stopped","annotations":{"sublet.lease":"../../x\u001b"}}"#;
        assert_eq!(lease_of(state), Err("../../x\\u{1b}".to_owned()));
    }

    #[test]
    fn refuses_text_that_is_no_state() {
        let cases = [
            ("", "it is empty"),
            (" \n", "it is empty"),
            (r#"{"id":"c"}"#, "missing key `status` at line 1 column 10"),
            (r#"{"status":"stopped"}"#, "missing key `id` at line 1 column 20"),
            (r#"{"id":"","status":"stopped"}"#, "its id is empty"),
            (r#"{"id":"c","id":"d","status":"stopped"}"#, "duplicate key `id` at line 1 column 14"),
            (r#"{"id":7,"status":"stopped"}"#, "a value must be a string, not 7 at line 1 column 7"),
            (
                r#"{"id":"c","status":"gone"}"#,
                "unknown value `gone`, expected one of `creating`, `created`, `running`, `stopped` at line 1 column 25",
            ),
            (r#"{"id":"c","status":"stopped"} x"#, "trailing characters at line 1 column 31"),
            ("[]", "a value must be an object, not an array of 0 at line 1 column 2"),
        ];
        for (text, message) in cases {
            assert_eq!(State::parse(text.as_bytes()).unwrap_err().to_string(), message, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(state) = State::parse(&text) {
                let _ = state.lease();
            }
        }
    }
}

#[cfg(test)]
mod logger_tests {
    use super::*;

    #[test]
    fn a_line_is_one_datagram_in_the_form_of_syslog() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert!(send_to_logger(&path, Level::Error, "nobody listens").is_err());
        let listener = UnixDatagram::bind(&path).unwrap();
        send_to_logger(&path, Level::Error, "container c: no\nplace").unwrap();
        let mut text = [0; 200];
        let length = listener.recv(&mut text).unwrap();
        let pid = std::process::id();
        let expected = format!("<11>sublet-hook[{pid}]: container c: no\\nplace");
        assert_eq!(std::str::from_utf8(&text[..length]).unwrap(), expected);
    }
}
