//! Gives the NVML stand-in the soname of the real library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Not `rustc-cdylib-link-arg`, which cargo hands on to the libcuda that is built on this crate. This one
    // reaches the programs too: one named as the library that it loads would find itself.
    println!("cargo:rustc-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo:rustc-link-arg-bins=-Wl,-soname,sublet-sim-program");
    println!("cargo:rustc-link-arg-tests=-Wl,-soname,sublet-sim-test");
}
