//! A CUDA program that reports what it got.

fn main() -> std::process::ExitCode {
    nvidia_ml::mps::probe::main()
}
