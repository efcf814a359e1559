//! `sublet`: the program that users and systemd run.

fn main() -> std::process::ExitCode {
    sublet::commands::main()
}
