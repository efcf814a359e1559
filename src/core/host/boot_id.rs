//! The id of this boot: no process, lease or lock outlives it.

use std::fs;
use std::io;
use std::sync::OnceLock;

/// Where the kernel says it (random(4)).
pub const FILE: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot.
///
/// # Errors
/// [`FILE`] cannot be read.
pub fn read() -> io::Result<&'static str> {
    static ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = ID.get() {
        return Ok(id);
    }
    let id = fs::read_to_string(FILE)?;
    Ok(ID.get_or_init(|| id.trim().to_owned()))
}
