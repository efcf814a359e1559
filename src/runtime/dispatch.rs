//! `sublet-runtime` and `sublet-hook` are one program. The name by which it is started decides which one it is. Nearly
//! all of their code is the same, and two copies would make up most of the package.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use sublet_core::process::inheritance;

const HOOK: &str = "sublet-hook";

/// Runs the program that was asked for; `args` begin with the program's name. Returns its exit status.
pub fn main(args: impl Iterator<Item = OsString>) -> u8 {
    inheritance::init_process();
    let args: Vec<OsString> = args.collect();
    let named = args.first().map_or(Path::new(""), Path::new);
    // The first argument of a hook is whatever the hook's JSON says.
    if is_hook(named) || inheritance::executed().is_some_and(is_hook) {
        crate::hook::main(args.into_iter())
    } else {
        crate::shim::main(args.into_iter())
    }
}

fn is_hook(program: &Path) -> bool {
    program.file_name() == Some(OsStr::new(HOOK))
}
