//! The built-in loads of `sublet bench`: programs that use the GPU in a typical way again and again, and print how long each
//! iteration took. They need nothing but the driver.

use std::ffi::CStr;
use std::io::Write as _;
use std::time::{Duration, Instant};

use crate::libcuda::{Buffer, Driver, Kernel, MULTIPROCESSOR_COUNT, Pinned};

/// The kernels, and the zero byte that ends them for the driver.
const PTX: &[u8] = concat!(include_str!("kernels.ptx"), "\0").as_bytes();

/// Threads of a block.
const THREADS: u32 = 256;

/// Lines are written together, so that writing does not disturb the measurement.
const TELL_EVERY: Duration = Duration::from_millis(100);

const MIB: usize = 1 << 20;

/// The work of one iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Load {
    /// 100 kernels of 16 blocks one after the other: a small model, far from filling a GPU
    Small,
    /// 20 kernels of 64 blocks
    Medium,
    /// 2 kernels of 16 blocks for each SM: training, large batches
    Large,
    /// Copies 256 MiB within the GPU's memory 4 times
    Memory,
    /// Copies 32 MiB to the GPU and back
    Copy,
    /// A small, a large and a copied part, and 10 ms of thinking between two iterations, which do not count
    Mixed,
}

impl Load {
    /// Bytes of each of the two buffers on the GPU.
    const fn buffer(self) -> usize {
        MIB * if matches!(self, Self::Memory) { 256 } else { 32 }
    }
}

/// The state of a load.
struct Prepared {
    driver: Driver,
    compute: Kernel,
    stream: Kernel,
    sms: u32,
    buffers: [Buffer; 2],
    host: Pinned,
}

impl Prepared {
    fn new(load: Load) -> Result<Self, String> {
        let driver = Driver::load()?;
        let device = driver.context()?;
        let sms = driver.attribute(MULTIPROCESSOR_COUNT, device)?.max(1).unsigned_abs();
        let ptx = CStr::from_bytes_with_nul(PTX).map_err(|error| error.to_string())?;
        let [compute, stream] = driver.kernels(ptx, [c"compute", c"stream"])?;
        let buffers = [driver.allocate(load.buffer())?, driver.allocate(load.buffer())?];
        let host = driver.pinned(load.buffer().min(32 * MIB))?;
        Ok(Self { driver, compute, stream, sms, buffers, host })
    }

    /// Without its compiler for PTX the driver starts no kernel and reports no error.
    fn check(&self) -> Result<(), String> {
        self.compute(1, 1)?;
        self.driver.synchronize()?;
        if self.driver.second_float(self.buffers[0])? > 0.0 {
            return Ok(());
        }
        Err("a kernel was started and did nothing: is libnvidia-ptxjitcompiler.so.1 in the container?"
            .to_owned())
    }

    /// One kernel of `blocks` blocks that computes `rounds` rounds.
    fn compute(&self, blocks: u32, rounds: u32) -> Result<(), String> {
        // Both buffers hold more floats than the largest of GPUs has threads here.
        self.driver.launch(self.compute, (blocks.min(16_384), THREADS), self.buffers, rounds)
    }

    /// Copies `bytes` from the second buffer to the first, on the device.
    fn stream(&self, bytes: usize) -> Result<(), String> {
        let pieces = u32::try_from(bytes / 16).unwrap_or(u32::MAX);
        self.driver.launch(self.stream, (self.sms * 8, THREADS), self.buffers, pieces)
    }

    /// One iteration, from its first call to its end on the device.
    fn iterate(&mut self, load: Load) -> Result<(), String> {
        match load {
            Load::Small => self.several(100, 16, 250)?,
            Load::Medium => self.several(20, 64, 1500)?,
            Load::Large => self.several(2, self.sms * 16, 3000)?,
            Load::Memory => (0..4).try_for_each(|_| self.stream(load.buffer()))?,
            Load::Copy => self.there_and_back(32 * MIB)?,
            Load::Mixed => {
                self.there_and_back(4 * MIB)?;
                self.several(50, 16, 250)?;
                self.several(1, self.sms * 16, 1500)?;
            }
        }
        self.driver.synchronize()
    }

    fn several(&self, launches: u32, blocks: u32, rounds: u32) -> Result<(), String> {
        (0..launches).try_for_each(|_| self.compute(blocks, rounds))
    }

    fn there_and_back(&mut self, bytes: usize) -> Result<(), String> {
        self.driver.upload(self.buffers[0], &self.host, bytes)?;
        self.driver.download(&mut self.host, self.buffers[0], bytes)
    }
}

/// Runs a load until its reader is gone or it is killed. Each line of its output is an iteration: the time of its end by
/// `CLOCK_MONOTONIC`, which is the same in all containers, and how long it took, both in nanoseconds.
///
/// # Errors
/// The driver's, in one line.
pub fn run(load: Load) -> Result<(), String> {
    let mut prepared = Prepared::new(load)?;
    prepared.check()?;
    let mut written = Instant::now();
    let mut lines = Vec::new();
    loop {
        let start = Instant::now();
        prepared.iterate(load)?;
        let took = start.elapsed();
        let _ = writeln!(lines, "{} {}", monotonic_nanoseconds(), took.as_nanos());
        if written.elapsed() >= TELL_EVERY {
            let mut output = std::io::stdout().lock();
            if output.write_all(&lines).and_then(|()| output.flush()).is_err() {
                return Ok(());
            }
            lines.clear();
            written = Instant::now();
        }
        std::thread::sleep(Duration::from_millis(if load == Load::Mixed { 10 } else { 0 }));
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds.
pub fn monotonic_nanoseconds() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_end_in_zero_and_have_their_names() {
        let ptx = CStr::from_bytes_with_nul(PTX).unwrap().to_str().unwrap();
        for name in ["compute", "stream"] {
            assert_eq!(ptx.matches(&format!(".visible .entry {name}(")).count(), 1);
        }
    }
}
