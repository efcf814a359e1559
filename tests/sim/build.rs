//! Gives the simulated NVML the soname of the real library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // `rustc-cdylib-link-arg` would also apply to the libcuda that depends on this crate. `rustc-link-arg` applies to
    // the programs too, and a program with the soname of the library that it loads would find itself. So they get
    // another one.
    println!("cargo:rustc-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo:rustc-link-arg-bins=-Wl,-soname,sublet-sim-program");
    println!("cargo:rustc-link-arg-tests=-Wl,-soname,sublet-sim-test");
}
