//! /proc/devices: which driver has which device major.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use super::below::under;
use crate::reading::regular_file;

/// Far more than the file has, in bytes.
const LONGEST: u64 = 1 << 16;

/// The content of `/proc/devices` below the driver root. It is cut at a length that no kernel reaches.
pub fn read(root: &Path) -> io::Result<String> {
    let text = regular_file(File::open(under(root, "/proc/devices"))?.take(LONGEST), 0, LONGEST)?;
    String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData.into())
}
