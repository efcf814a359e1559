//! A low-level runtime's command line: one argument a line, the first line says whose.
#![no_main]

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt as _;

use libfuzzer_sys::fuzz_target;
use sublet_runtime::shim::{Command, Dialect, parse};

fuzz_target!(|data: &[u8]| {
    let mut words = data.split(|byte| *byte == b'\n').map(|word| OsString::from_vec(word.to_vec()));
    let dialect = if words.next().is_some_and(|word| word == "crun") { Dialect::Crun } else { Dialect::Runc };
    let args: Vec<OsString> = words.collect();
    let line = parse(&args, dialect);
    let is_argument = |id: &OsStr| args.iter().any(|arg| arg == id);
    assert!(line.id.as_deref().is_none_or(is_argument), "{line:?}");
    let Command::Exec(exec) = line.command else { return };
    // An environment may be put in there: nothing else changes by it.
    assert!(exec.options_end <= args.len());
    if line.id.is_none() || exec.process.is_some() {
        return;
    }
    let (before, behind) = args.split_at(exec.options_end);
    let more = [before, &["--env".into(), "A=1".into()], behind].concat();
    let again = parse(&more, dialect);
    assert_eq!(again.global, line.global);
    let Command::Exec(edited) = again.command else { panic!("{again:?}") };
    assert_eq!((&again.id, &edited.process), (&line.id, &exec.process));
    assert_eq!(edited.env, [exec.env, vec!["A=1".into()]].concat());
});
