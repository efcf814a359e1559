//! From annotations to a [`Request`]: keys, values, defaults and the rules between them.

use std::collections::BTreeMap;

use super::Request;
use crate::config::Config;

/// Why annotations do not make a request. Every message names the key, the value and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {}

/// Whether any of `annotations` makes the container ours: a key beginning `sublet.`, and no sandbox.
#[must_use]
pub fn is_ours(_annotations: &BTreeMap<String, String>) -> bool {
    todo!()
}

/// Reads `annotations` (others than `sublet.*` are passed over) into a request.
///
/// `share` is the named share that the door already knows (`sublet-<share>`); `image_capabilities` is
/// the image's NVIDIA_DRIVER_CAPABILITIES, used where `sublet.capabilities` is absent.
///
/// # Errors
/// An unknown key, a value that does not parse, a contradiction.
pub fn parse(
    _annotations: &BTreeMap<String, String>,
    _share: Option<&str>,
    _image_capabilities: Option<&str>,
    _config: &Config,
) -> Result<Request, RequestError> {
    todo!()
}
