//! The simulated `nvidia-cuda-mps-server`.

fn main() -> anyhow::Result<()> {
    nvidia_ml::mps::server::main()
}
