//! Gives the simulated libcuda the soname of the real library, and hides all symbols except its own, because each
//! simulated driver has a copy.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-s");
}
