//! The OCI runtime shim. Called by the name `sublet-hook`, it is the OCI hook: nearly all of their code is the same, and two
//! copies would make up most of the package.
//!
//! Its `main` is C's, which spares a start the standard library's own setup: 15 system calls for a handler that
//! prints a line when the stack overflows. The kernel ends the process either way. The rest of that setup is in
//! [`inheritance::init_process`](sublet_core::process::inheritance::init_process). On glibc the standard library has
//! the arguments in any case (`std::env::args`, "Platform-specific behavior").
#![no_main]
#![allow(unsafe_code, reason = "the name of C's main")]

use std::ffi::{OsStr, OsString, c_char, c_int};
use std::path::Path;

use sublet_core::process::inheritance;
use sublet_runtime::{hook, shim};

/// Called by the C library.
// SAFETY: the program has no other symbol of this name, and this one has the type that C's has.
#[unsafe(no_mangle)]
pub extern "C" fn main(_: c_int, _: *const *const c_char) -> c_int {
    inheritance::init_process();
    let args: Vec<OsString> = std::env::args_os().collect();
    let named = args.first().map_or(Path::new(""), Path::new);
    let is_hook = |program: &Path| program.file_name() == Some(OsStr::new("sublet-hook"));
    // The first argument of a hook is whatever the hook's JSON says.
    if is_hook(named) || inheritance::executed().is_some_and(is_hook) {
        hook::main(&args)
    } else {
        shim::main(&args)
    }
}
