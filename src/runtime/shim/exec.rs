//! `exec`: the environment in config.json reaches only a container's first process. Later processes
//! get the same edits here, in a copy of the engine's process file or on the command line.

use std::cell::LazyCell;
use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::{Call, Dialect, Exec};
use crate::bounded_input;
use sublet_core::admit::{self, Share};
use sublet_core::config::{Config, WithoutDaemon};
use sublet_core::config_files::ConfigError;
use sublet_core::grant::{Environment, refused_beside};
use sublet_core::oci::{self, JsonFile};
use sublet_core::process::confine;
use sublet_core::process::inheritance::effective_user;
use sublet_core::text::safe;

/// How long reading a process file may take if it is a pipe.
const FILE_LIMIT: Duration = Duration::from_secs(10);

/// Longest process file that is read. It holds the whole environment, which Linux limits to 6 MiB.
const LONGEST: usize = 16 << 20;

/// Above the descriptor numbers that `--preserve-fds` may refer to.
const HIGH: i32 = 500;

/// Gives a process that joins a container with a share the share's environment, or does not start it.
pub(super) fn exec<'a>(call: &Call<'a>, exec: &'a Exec) -> anyhow::Result<i32> {
    // Parsed only when needed, because most containers have no share.
    let config = LazyCell::new(|| call.files.config());
    let Some((id, record, share)) = find_target(call, exec, &config)? else { return call.pass_on() };
    let config = config.as_ref().ok();
    let environment = match admit::enter(&share, id, &record, config) {
        Ok(()) => share.environment.clone(),
        Err(error) if config.is_some_and(|config| config.mps.exec_without_daemon == WithoutDaemon::NoGpu) => {
            // Its options would replace config.json's environment, and a command line is shown to every user.
            if exec.process.is_none() && exec.env.is_empty() && call.low_level.dialect == Dialect::Crun {
                bail!(
                    "{error}; and crun takes an environment without a GPU only on its command line, which every user can \
                     read: pass the process with --process, or its variables with --env"
                );
            }
            confine::refuse_drivers().map_err(|error| {
                anyhow!(
                    "the process cannot be kept away from the GPU, which `[mps] exec_without_daemon` asks for: seccomp: \
                     {error}"
                )
            })?;
            call.warn(&format!("container {}: {error}: the process starts without the GPU", safe(id)));
            without_gpu(&share.environment)
        }
        Err(error) => return Err(error.into()),
    };
    let options = if let Some(file) = &exec.process {
        vec![option_form(exec, "process", "-p", "--process").into(), write_edited_copy(file, &environment)?]
    } else {
        let option = option_form(exec, "env", "-e", "--env");
        options(&environment, &share.environment, &exec.env, call.low_level.dialect, option)
    };
    let (before, behind) = call.args.split_at(exec.options_end);
    Err(call.become_low_level(&[before, &options, behind].concat()))
}

/// The option by its letter if the command line has it so: runc refuses both forms together.
fn option_form<'f>(exec: &Exec, name: &str, letter: &'f str, long: &'f str) -> &'f str {
    if exec.letters.contains(&name) { letter } else { long }
}

/// The container to join, by id and record, with its share.
type Target<'a> = (&'a str, PathBuf, Share);

fn find_target<'e>(
    call: &Call<'e>,
    exec: &'e Exec,
    config: &impl Deref<Target = Result<Config, ConfigError>>,
) -> anyhow::Result<Option<Target<'e>>> {
    // The runtime itself refuses a malformed id.
    let find = |id: &'e OsStr| -> anyhow::Result<Option<Target<'e>>> {
        let named = id.to_str().and_then(|id| Some((id, call.record(id)?)));
        let Some((id, record)) = named else { return Ok(None) };
        if !admit::may_have_share(&record)? {
            return Ok(None);
        }
        let share = admit::find_share(effective_user(), id, &record, config)?;
        Ok(share.map(|share| (id, record, share)))
    };
    if let Some(id) = &call.line.id {
        return find(id);
    }
    let mut certain = None;
    for name in &exec.names {
        let Some(next) = find(name)? else { continue };
        if exec.process.is_none() || certain.is_some() {
            // It is of a later version of the runtime.
            bail!(
                "exec has an option that this sublet does not know, and one of the words after it is a container with a \
                 share of a GPU: pass the process with --process, or leave the option out"
            );
        }
        certain = Some(next);
    }
    Ok(certain)
}

/// As `share`, for a process that must not see any device.
fn without_gpu(share: &Environment) -> Environment {
    let mut environment = share.clone();
    environment.set.retain(|(name, _)| name != "CUDA_VISIBLE_DEVICES");
    environment.set.insert(0, ("CUDA_VISIBLE_DEVICES".to_owned(), String::new()));
    environment
}

/// Returns the path of a copy of `file` with the share's environment. The original is only read, because it belongs to the
/// caller or may be a pipe.
fn write_edited_copy(file: &Path, environment: &Environment) -> anyhow::Result<OsString> {
    let file = read_process_file(file)?;
    let mut process = file.parse()?;
    oci::edit_environment(&mut process, environment)?;
    let copied = serde_json::to_vec(&process).map_err(io::Error::from).and_then(|text| write_memfd(&text));
    Ok(copied.map_err(|error| anyhow!("the process file cannot be copied: {error}"))?.into())
}

/// Follows links, because `/dev/stdin` is one, often to a pipe.
fn read_process_file(path: &Path) -> anyhow::Result<JsonFile> {
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let text = opened.and_then(|file| bounded_input::read(file, LONGEST, Instant::now() + FILE_LIMIT));
    let failed = |why| anyhow!("the process file {} cannot be used: {why}", safe(&path.to_string_lossy()));
    Ok(JsonFile { path: path.to_owned(), text: text.map_err(failed)? })
}

/// Writes `text` to a file that survives exec(2). Returns a path by which the next program can open it.
fn write_memfd(text: &[u8]) -> io::Result<String> {
    let mut file = std::fs::File::from(memfd_create(c"sublet-process", MFdFlags::empty())?);
    file.write_all(text)?;
    // Kept open until the end, at a high number if the limit allows, otherwise at its own number.
    let number = match fcntl(&file, FcntlArg::F_DUPFD(HIGH)) {
        Ok(number) => number,
        Err(_) => std::os::fd::IntoRawFd::into_raw_fd(file),
    };
    Ok(format!("/proc/self/fd/{number}"))
}

/// Options in the form of `option`, to be placed after the user's own `given`. In both runtimes the last one counts.
///
/// runc adds the options to config.json's environment, which already has the share's (utils and `getProcess` in
/// exec.go). crun replaces that environment by the options (libcrun/container.c, `if (process->env_len)`). Without
/// options, both use config.json's.
fn options(
    environment: &Environment,
    share: &Environment,
    given: &[OsString],
    dialect: Dialect,
    option: &str,
) -> Vec<OsString> {
    if given.is_empty() && environment == share {
        return Vec::new();
    }
    let given = given.iter().map(|entry| entry.as_bytes().split(|byte| *byte == b'=').next());
    let is_given = |name: &str| given.clone().any(|given| given == Some(name.as_bytes()));
    let pair = |(name, value): &(String, String)| format!("{name}={value}");
    let defaults = environment.default.iter().filter(|(name, _)| !is_given(name));
    let defaults = defaults.filter_map(|default| {
        let is_refused = refused_beside(&default.0).is_some_and(is_given);
        match dialect {
            Dialect::Crun => (!is_refused).then(|| pair(default)),
            // No option removes a variable, but frameworks treat an empty one as unset.
            Dialect::Runc => is_refused.then(|| format!("{}=", default.0)),
        }
    });
    let entries = environment.set.iter().map(pair).chain(defaults);
    entries.flat_map(|entry| [OsString::from(option), OsString::from(entry)]).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn share() -> Environment {
        Environment {
            set: pairs(&[("CUDA_VISIBLE_DEVICES", "0")]),
            default: pairs(&[("XLA", "0.1"), ("XLB", "0.2")]),
            remove_prefixes: Vec::new(),
        }
    }

    #[test]
    fn options_for_the_command_line() {
        let (share, given) = (share(), ["XLA=0.9".into(), "CUDA_VISIBLE_DEVICES=3".into()]);
        let with = |dialect| options(&share, &share, &given, dialect, "--env");
        assert_eq!(with(Dialect::Runc), ["--env", "CUDA_VISIBLE_DEVICES=0"]);
        assert_eq!(with(Dialect::Crun), ["--env", "CUDA_VISIBLE_DEVICES=0", "--env", "XLB=0.2"]);
        for dialect in [Dialect::Runc, Dialect::Crun] {
            assert!(options(&share, &share, &[], dialect, "--env").is_empty(), "config.json has it");
        }
    }

    #[test]
    fn without_a_gpu_no_device_is_seen_and_all_else_is_as_before() {
        let share = share();
        let without = options(&without_gpu(&share), &share, &[], Dialect::Runc, "--env");
        assert_eq!(without, ["--env", "CUDA_VISIBLE_DEVICES="]);
    }

    #[test]
    fn a_process_file_is_read_and_never_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("process.json");
        let text = r#"{"env":["A=1"],"args":["x"]}"#;
        std::fs::write(&file, text).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let copy = write_edited_copy(&link, &share()).unwrap();
        let expected = r#"{"env":["A=1","CUDA_VISIBLE_DEVICES=0","XLA=0.1","XLB=0.2"],"args":["x"]}"#;
        assert_eq!(std::fs::read_to_string(&copy).unwrap(), expected);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
        let number: i32 = Path::new(&copy).file_name().unwrap().to_str().unwrap().parse().unwrap();
        assert!(number >= HIGH);
        nix::unistd::close(number).unwrap();
        let error = write_edited_copy(dir.path(), &share()).unwrap_err().to_string();
        assert!(error.starts_with("the process file ") && error.contains(" cannot be used: "), "{error}");
    }

    #[test]
    fn a_pipe_is_a_process_file_too() {
        let (from, to) = nix::unistd::pipe().unwrap();
        std::fs::File::from(to).write_all(br#"{"env":[]}"#).unwrap();
        let path = format!("/proc/self/fd/{}", from.as_raw_fd());
        assert_eq!(read_process_file(Path::new(&path)).unwrap().text, br#"{"env":[]}"#);
    }

    #[test]
    fn a_default_that_is_refused_beside_the_users_own_gives_way() {
        let default = pairs(&[("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")]);
        let share = Environment { default, ..Environment::default() };
        let given = ["XLA_CLIENT_MEM_FRACTION=0.5".into()];
        let runc = ["--env", "XLA_PYTHON_CLIENT_MEM_FRACTION="];
        let with = |dialect| options(&share, &share, &given, dialect, "--env");
        assert_eq!(with(Dialect::Runc), runc);
        assert!(with(Dialect::Crun).is_empty());
    }
}
