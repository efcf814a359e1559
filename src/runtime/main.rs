//! The OCI runtime shim. Called by the name `sublet-hook`, it is the OCI hook.
//!
//! Its `main` is C's, which spares a start what the standard library does before its own: 15 system calls for a handler
//! that prints a line when the stack overflows. The kernel ends the process either way. What else is done there,
//! [`inheritance::begin`](sublet_core::process::inheritance::begin) does. On glibc the standard library has the arguments in
//! any case (std::env::args, "Platform-specific behavior").
#![no_main]
#![allow(unsafe_code, reason = "the name of C's main")]

use std::ffi::{c_char, c_int};

/// What the C library calls.
// SAFETY: the program has no other symbol of this name, and this one has the type that C's has.
#[unsafe(no_mangle)]
pub extern "C" fn main(_: c_int, _: *const *const c_char) -> c_int {
    sublet_runtime::dispatch::main(std::env::args_os()).into()
}
