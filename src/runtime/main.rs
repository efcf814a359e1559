//! The OCI runtime shim. Called by the name `sublet-hook`, it is the OCI hook.
//!
//! Its `main` is C's, which spares a start the standard library's own setup: 15 system calls for a handler that
//! prints a line when the stack overflows. The kernel ends the process either way. The rest of that setup is in
//! [`inheritance::init_process`](sublet_core::process::inheritance::init_process). On glibc the standard library has
//! the arguments in any case (`std::env::args`, "Platform-specific behavior").
#![no_main]
#![allow(unsafe_code, reason = "the name of C's main")]

use std::ffi::{c_char, c_int};

/// Called by the C library.
// SAFETY: the program has no other symbol of this name, and this one has the type that C's has.
#[unsafe(no_mangle)]
pub extern "C" fn main(_: c_int, _: *const *const c_char) -> c_int {
    sublet_runtime::dispatch::main(std::env::args_os()).into()
}
