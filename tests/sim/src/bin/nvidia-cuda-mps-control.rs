//! The simulated `nvidia-cuda-mps-control`.

fn main() -> std::process::ExitCode {
    nvidia_ml::mps::control::main()
}
