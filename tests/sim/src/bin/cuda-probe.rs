//! A CUDA program that reports the resources that it sees.

fn main() -> std::process::ExitCode {
    nvidia_ml::mps::probe::main()
}
