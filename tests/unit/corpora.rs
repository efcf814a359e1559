//! The fuzz targets with each input of fuzz/corpus, without libFuzzer: what a run of fuzzing has found stays mended.

// What the targets take from libFuzzer and from their own package is here.
extern crate self as libfuzzer_sys;
extern crate self as sublet_fuzz;

use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

#[path = "../../fuzz/src/lib.rs"]
mod demands;
use demands::{is_safe, ok};

/// What a target asks for, of bytes.
trait Input<'a> {
    fn of(bytes: &'a [u8]) -> Self;
}

impl<'a> Input<'a> for &'a [u8] {
    fn of(bytes: &'a [u8]) -> Self {
        bytes
    }
}

/// As far as it is UTF-8, as libFuzzer gives it.
impl<'a> Input<'a> for &'a str {
    fn of(bytes: &'a [u8]) -> Self {
        let valid = std::str::from_utf8(bytes).map_or_else(|error| error.valid_up_to(), str::len);
        std::str::from_utf8(&bytes[..valid]).expect("valid so far")
    }
}

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

/// Fails with the inputs that a target does not bear.
fn replay(target: &str, run: fn(&[u8])) {
    let inputs = files(&fuzz().join("corpus").join(target));
    assert!(!inputs.is_empty(), "fuzz/corpus/{target} is empty");
    let fails = |input: &&PathBuf| {
        let bytes = std::fs::read(input).expect("an input");
        catch_unwind(|| run(&bytes)).is_err()
    };
    let failing: Vec<_> = inputs.iter().filter(fails).collect();
    assert!(failing.is_empty(), "{target}: {failing:?}");
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                replay(stringify!($name), targets::$name::run);
            }
        )*

        /// A target that is in no list would never be replayed.
        #[test]
        fn all_are_here() {
            let mut there: Vec<_> = files(&fuzz().join("targets"));
            there.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
            let listed = [$(stringify!($name)),*];
            let is_listed = |file: &&PathBuf| listed.iter().any(|name| file.ends_with(format!("{name}.rs")));
            assert_eq!(there.iter().find(|file| !is_listed(file)), None);
        }
    };
}

targets! {
    annotations argv config_file config_json hook_state layout_toml layout_yaml ledger serve_line setup_containerd setup_docker
}

#[path = "../../fuzz/targets"]
#[allow(unused_attributes, reason = "by themselves they have libFuzzer's main")]
mod targets {
    pub mod annotations;
    pub mod argv;
    pub mod config_file;
    pub mod config_json;
    pub mod hook_state;
    pub mod layout_toml;
    pub mod layout_yaml;
    pub mod ledger;
    pub mod serve_line;
    pub mod setup_containerd;
    pub mod setup_docker;
}

// Behind the targets, which import it.
/// As libFuzzer's: a target is a function of an input.
macro_rules! fuzz_target {
    (|$data:ident: $input:ty| $body:block) => {
        pub fn run(bytes: &[u8]) {
            fn target($data: $input) $body
            target(crate::Input::of(bytes))
        }
    };
}
pub(crate) use fuzz_target;
