//! The OCI runtime shim, and by the name `sublet-hook` the OCI hook.

fn main() -> std::process::ExitCode {
    sublet_runtime::dispatch::main(std::env::args_os())
}
