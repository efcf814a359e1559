//! The stand-in libcuda, which is another package's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Any program that cargo built for the test: its path shows where the others are.
const PROGRAM: &str = env!("CARGO_BIN_EXE_cuda-probe");

/// The stand-in: of `SUBLET_BIN_DIR`, else built by cargo, since another package's library is not built for a test.
pub fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(dir) = std::env::var_os("SUBLET_BIN_DIR") {
            return Path::new(&dir).join("libcuda.so");
        }
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--package", "sublet-sim-libcuda"]);
        build.args(["--target-dir".as_ref(), Path::new(PROGRAM).ancestors().nth(2).unwrap()]);
        assert!(build.status().unwrap().success(), "the stand-in libcuda does not build");
        Path::new(PROGRAM).ancestors().nth(2).unwrap().join("debug/libcuda.so")
    })
}
