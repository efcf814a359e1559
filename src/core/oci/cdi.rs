//! Named shares as CDI devices (Container Device Interface, SPEC.md 0.5.0): `sublet/share=small.0` is the
//! share `small` on GPU 0.
//!
//! The specification that `sublet cdi generate` writes has the device nodes and the environment. They are the
//! same for every container of that device. The rest depends on the image or the lease, and is done by
//! `sublet-hook cdi`, which the specification names. Its arguments are the share and the
//! device; the container's annotations and environment do not.

use super::conflict::Conflict;
use crate::text::safe;

/// Vendor and class of all of sublet's CDI devices.
pub const KIND: &str = "sublet/share";

/// The hook's stage, its first argument.
pub const STAGE: &str = "cdi";

/// The share and the device that one of sublet's CDI devices stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The share's name in the configuration.
    pub share: String,
    /// UUID of the device.
    pub device: String,
}

/// Why a CDI device cannot be served.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CdiError {
    /// The hook's arguments are not those that sublet writes.
    #[error("the arguments of sublet-hook are not sublet's; fix: run `sublet cdi generate` again")]
    Arguments,
    /// The container has two different CDI devices of sublet's.
    #[error("two CDI devices of {KIND} are asked for, {0} and {1}; fix: remove one of them")]
    Several(String, String),
    /// The hook runs for a container whose config.json does not have it.
    #[error("its config.json has no CDI device of {KIND}; fix: use `sublet-hook createRuntime`")]
    NotAsked,
    /// The device's share, and annotations for another, as `sublet.sm=50`.
    #[error("{1} and the CDI device {KIND}={0} ask for different shares; fix: remove one of the two")]
    Contradiction(String, String),
    /// The device that the specification was written for.
    #[error("the CDI specification has share {share} on {device}, {why}; fix: run `sublet cdi generate`")]
    Device {
        /// The share.
        share: String,
        /// UUID.
        device: String,
        /// Why not.
        why: String,
    },
    /// The share of the CDI device, and a variable of the device's that config.json does not have.
    #[error(
        "its environment lacks the {1} of the CDI device {KIND}={0}; fix: if the container sets it, remove that; \
         or run `sublet cdi generate`"
    )]
    Environment(String, String),
    /// The share, and a variable that a CDI device cannot remove.
    #[error("its environment has {1}, which contradicts the CDI device {KIND}={0}; fix: remove it")]
    Strange(String, String),
    /// The share, and another NVIDIA node, or a rule for one, in addition to the nodes and rules of the device.
    #[error("{1} (if it comes from the CDI device {KIND}={0}, run `sublet cdi generate`)")]
    Conflict(String, Conflict),
    /// Rootless engines cannot use CDI devices: neither the hook nor the nodes work there.
    #[error("CDI devices of {KIND} need root; fix: use annotations in its place (docs/rootless.md)")]
    Rootless,
}

impl Asked {
    /// Reads the hook's arguments, without its name and stage.
    ///
    /// # Errors
    /// They do not have the form of [`Asked::arguments`].
    pub fn parse<'a>(arguments: impl Iterator<Item = &'a str>) -> Result<Self, CdiError> {
        match arguments.collect::<Vec<_>>()[..] {
            ["--share", share, "--device", device] if !share.is_empty() && !device.is_empty() => {
                Ok(Self { share: share.to_owned(), device: device.to_owned() })
            }
            _ => Err(CdiError::Arguments),
        }
    }

    /// The arguments with which the hook is called at `stage`.
    pub fn arguments<'a>(&'a self, stage: &'a str) -> [&'a str; 6] {
        ["sublet-hook", stage, "--share", &self.share, "--device", &self.device]
    }

    /// Its share and device, for messages.
    pub(crate) fn name(&self) -> String {
        safe(&format!("{} on {}", self.share, self.device))
    }
}
