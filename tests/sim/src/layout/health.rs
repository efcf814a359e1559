//! What a GPU reports of its health: `DIR/sim/events` and `DIR/dev/kmsg` have the Xids that `sublet-sim xid` makes, and
//! `DIR/sim/health` has lines `GPU WORD NUMBER`, with NVML's index of the GPU: `0 230 1` sets a field of
//! `nvmlDeviceGetFieldValues`, `0 163/17 1` one that is counted by link, of link 17, `0 slow 64` the reasons of
//! `nvmlDeviceGetCurrentClocksThrottleReasons`, `0 fabric 3` and `0 fabric-status 1` state and status of
//! `nvmlDeviceGetGpuFabricInfo`. A line `GPU 0` in `sim/events` is an uncorrectable memory error.
//!
//! A line of the kernel's log is as an H100's with driver 580: `NVRM: Xid (PCI:0000:3b:00): 31, pid=…, name=…, …`.

use std::fs::{self, File};
use std::io::{self, Write as _};

use super::Root;
use super::topology::Gpu;

/// The Xids so far, each with NVML's index of its GPU; 0 is an uncorrectable memory error.
#[must_use]
pub fn xids(root: &Root) -> Vec<(u32, u64)> {
    let text = fs::read_to_string(root.join("sim/events")).unwrap_or_default();
    let parse = |line: &str| {
        let (gpu, number) = line.split_once(' ')?;
        Some((gpu.parse().ok()?, number.parse().ok()?))
    };
    text.lines().filter_map(parse).collect()
}

/// `gpu` reports Xid `number` of process `pid`; `None`: the driver names none.
///
/// # Errors
/// A file cannot be written.
pub fn report(root: &Root, gpu: &Gpu, number: u64, pid: Option<u32>, text: &str) -> io::Result<()> {
    let append = |file: &str, line: String| {
        let mut file = File::options().append(true).create(true).open(root.join(file))?;
        file.write_all(line.as_bytes())
    };
    let bus = gpu.bus_id.split('.').next().unwrap_or_default();
    let sequence = xids(root).len() + 1;
    let comm = pid.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).ok());
    let name = comm.map_or_else(|| "<unknown>".to_owned(), |comm| comm.trim().to_owned());
    let process = pid.map_or_else(|| "pid='<unknown>'".to_owned(), |pid| format!("pid={pid}"));
    let words = if text.starts_with("GPU recovery") {
        text.to_owned()
    } else {
        format!("{process}, name={name}, {text}")
    };
    append(
        "dev/kmsg",
        format!("4,{sequence},{sequence}000000,-;NVRM: Xid (PCI:{bus}): {number}, {words}\n"),
    )?;
    append("sim/events", format!("{} {number}\n", gpu.index))
}

/// The number that `sim/health` has for `word` of a GPU.
#[must_use]
pub fn number(root: &Root, gpu: u32, word: &str) -> Option<u64> {
    number_in(&read(root), gpu, word)
}

/// The text of `sim/health`.
#[must_use]
pub fn read(root: &Root) -> String {
    fs::read_to_string(root.join("sim/health")).unwrap_or_default()
}

/// The number that this text has.
#[must_use]
pub fn number_in(text: &str, gpu: u32, word: &str) -> Option<u64> {
    let start = format!("{gpu} {word} ");
    text.lines().rev().find_map(|line| line.strip_prefix(&start)?.parse().ok())
}

/// A reset: the GPU is well.
///
/// # Errors
/// The file cannot be written.
pub fn reset(root: &Root, gpu: u32) -> io::Result<()> {
    let file = root.join("sim/health");
    let Ok(text) = fs::read_to_string(&file) else { return Ok(()) };
    let rest = text.lines().filter(|line| !line.starts_with(&format!("{gpu} ")));
    fs::write(file, rest.flat_map(|line| [line, "\n"]).collect::<String>())
}
