//! `sublet`: what people and systemd run.

fn main() -> std::process::ExitCode {
    sublet::commands::main()
}
