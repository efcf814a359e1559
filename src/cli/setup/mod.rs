//! Configures an engine to use sublet: edits of its configuration, text in, text out. Docker's and containerd's files are
//! edited; Podman and CRI-O get drop-ins.
//!
//! Foreign lines stay, and an undo after a setup restores the same file. The edits do no I/O: `sublet setup` does it.

pub mod containerd;
pub mod docker;
pub mod drop_ins;
pub mod engine_files;

use std::path::PathBuf;

/// The runtime's name in every engine.
pub const NAME: &str = "sublet";

/// Runs a program of this host and returns its standard output; `None` if it does not exist or fails.
pub(crate) type Ask = fn(&[&str]) -> Option<String>;

/// The settings to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Absolute path of `sublet-runtime`.
    pub runtime: PathBuf,
    /// The directory of sublet's own OCI hook, for Podman.
    pub hooks_dir: PathBuf,
    /// Whether sublet is to be the runtime of containers that name none.
    pub default: bool,
    /// Whether the engine is to take CDI devices.
    pub cdi: bool,
    /// The generic resources that Docker is to tell Swarm; `None`: they stay as they are.
    pub resources: Option<Vec<String>>,
}

/// Why a configuration was not edited. It is unchanged.
#[allow(missing_docs, reason = "the message says what the fields are")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// The file is incomplete, has comments that its language does not allow, or is something else.
    #[error("it is not valid {language} ({why}): correct it, then try again; nothing was changed")]
    Unparsable { language: &'static str, why: String },
    /// The file is valid, but the engine would not accept it.
    #[error("{key} is {found}, not {expected}: correct it, then try again; nothing was changed")]
    Shape { key: String, found: &'static str, expected: &'static str },
    /// Another runtime is registered under sublet's name.
    #[error("{key} already exists and differs from what sublet writes: remove it, then try again")]
    Taken { key: String },
    /// Docker's default runtime is `sublet`, but the runtime is not defined: dockerd does not start with that.
    #[error(
        "default-runtime is sublet, which is not among the runtimes: remove it with `sublet setup docker \
         --undo`, then try again; nothing was changed"
    )]
    Orphan,
    /// dockerd would not start any more.
    #[error(
        "dockerd does not start with {key} in this file while {flag} of {by} says it, too: remove that flag, then try \
         again; nothing was changed"
    )]
    Flag { flag: String, by: &'static str, key: &'static str },
    /// A key occurs twice.
    #[error("{0} occurs twice: remove one, then try again; nothing was changed")]
    Twice(String),
    /// containerd's first format, or a file without a version.
    #[error(
        "its version is not 2 or 3 (a file without `version` is version 1): `containerd config migrate` \
         prints it in the current version; nothing was changed"
    )]
    Version,
    /// containerd would not read the added lines.
    #[error(
        "it cannot be edited ({0}): write what it has for `plugins` as [tables], then try again; nothing was changed"
    )]
    Unedited(String),
    /// containerd takes other files' lines in place of sublet's.
    #[error(
        "containerd would not read sublet's lines: an imported file replaces their table ({files}); write them there \
         (`sublet setup containerd --config FILE`), or remove the table there; nothing was changed"
    )]
    Replaced { files: String },
    /// containerd does not read its file.
    #[error(
        "containerd does not read it with the files that it imports: `containerd --config {0} config dump` says why; \
         nothing was changed"
    )]
    Unread(String),
    /// Lines that a setup added have been edited.
    #[error("what `sublet setup` added has been changed since: {why}; nothing was changed")]
    Altered { why: String },
    /// The drop-in's name is taken by another file.
    #[error("it was not written by `sublet setup`: remove or rename it, then try again; nothing was changed")]
    Foreign,
    /// The path cannot be written in the file's language.
    #[error("the path {0} has characters that cannot be written into this file: install sublet elsewhere")]
    Path(String),
}

/// `path` as text that JSON and TOML have between double quotes as it is.
fn plain(path: &std::path::Path) -> Result<&str, SetupError> {
    let plain = path.to_str().filter(|text| !text.chars().any(|c| c.is_control() || matches!(c, '"' | '\\')));
    plain.ok_or_else(|| SetupError::Path(sublet_core::text::safe_path(path)))
}

/// A TOML parser's error, with the first line of its message, without the excerpt below it.
fn no_toml(error: impl std::fmt::Display) -> SetupError {
    let why = sublet_core::text::safe(error.to_string().lines().next().unwrap_or_default());
    SetupError::Unparsable { language: "TOML", why }
}

#[cfg(test)]
fn wish() -> Wish {
    Wish {
        runtime: "/usr/bin/sublet-runtime".into(),
        hooks_dir: "/usr/share/sublet/hooks.d".into(),
        default: false,
        cdi: false,
        resources: None,
    }
}
