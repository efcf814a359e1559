//! The OCI hook.

fn main() -> std::process::ExitCode {
    sublet::hook::main(std::env::args_os())
}
