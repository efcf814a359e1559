//! `sublet-runtime` and `sublet-hook` are one program. The name by which it is started decides which one it is. Nearly
//! all of their code is the same, and two copies would make up most of the package.
#![allow(unsafe_code, reason = "one call of libc's that nix has not")]

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::ExitCode;

use nix::libc;

const HOOK: &str = "sublet-hook";

/// Runs the program that was asked for; `args` begin with the program's name.
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    sublet_core::process::inheritance::outlive_file_limit();
    let args: Vec<OsString> = args.collect();
    let named = args.first().map_or(Path::new(""), Path::new);
    if is_hook(named) || executed().is_some_and(is_hook) {
        crate::hook::main(args.into_iter())
    } else {
        crate::shim::main(args.into_iter())
    }
}

fn is_hook(program: &Path) -> bool {
    program.file_name() == Some(OsStr::new(HOOK))
}

/// The path that was given to execve(2). The first argument of a hook is not used, because it is whatever the hook's
/// JSON says.
fn executed() -> Option<&'static Path> {
    // SAFETY: the only argument is a number, and no memory of this process is involved.
    let address = unsafe { libc::getauxval(libc::AT_EXECFN) };
    if address == 0 {
        return None;
    }
    // SAFETY: getauxval(3): the kernel put a string there, at the top of this process's stack, and nothing moves or
    // changes it.
    let path = unsafe { CStr::from_ptr(address as *const libc::c_char) };
    Some(Path::new(OsStr::from_bytes(path.to_bytes())))
}
