//! The OCI runtime shim.

fn main() -> std::process::ExitCode {
    sublet::runtime::main(std::env::args_os())
}
