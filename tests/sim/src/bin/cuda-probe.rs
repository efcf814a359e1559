//! A CUDA program that says what it got.

fn main() -> std::process::ExitCode {
    nvidia_ml::mps::probe::main()
}
