//! The id of this boot. No process, lease or lock outlives a boot.

use std::fs;
use std::io;
use std::sync::OnceLock;

/// The file in which the kernel gives it (random(4)).
pub const FILE: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot.
pub fn read() -> io::Result<&'static str> {
    static ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = ID.get() {
        return Ok(id);
    }
    let id = fs::read_to_string(FILE)?;
    Ok(ID.get_or_init(|| id.trim().to_owned()))
}
