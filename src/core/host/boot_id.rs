//! The id of this boot. No process, lease or lock outlives a boot.

use std::io;
use std::sync::OnceLock;

use crate::reading::kernel_file;

/// The file in which the kernel gives it (random(4)).
pub const FILE: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot.
pub fn read() -> io::Result<&'static str> {
    static ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = ID.get() {
        return Ok(id);
    }
    let id = kernel_file(FILE)?;
    Ok(ID.get_or_init(|| id.trim().to_owned()))
}
