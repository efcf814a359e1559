//! The OCI runtime shim. Called by the name `sublet-hook`, it is the OCI hook.

fn main() -> std::process::ExitCode {
    sublet_runtime::dispatch::main(std::env::args_os())
}
