//! Watches the health of GPUs: Xids in the kernel's log ([`teller`]), and what NVML tells of GPUs with leases ([`nvml_watch`]).
//! A driver that hangs with a sick GPU keeps only the second from working. The log alone names the process that an Xid is
//! about; and of several Xids NVML tells the last one (nvml.h, `nvmlEventSetWait_v2`).

mod gpu_state;
mod nvml_watch;
mod teller;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::sick_gpus::kernel_log::{KernelLog, Xid, end_of_log};
use crate::sick_gpus::xid::is_of_program;
use crate::sick_gpus::{self, Records};
use sublet_core::config_files;
use sublet_core::process::uptime_seconds;
use teller::Teller;

/// A service that starts later than this after boot, in seconds, and has no record of this boot, begins at the end of the log:
/// nobody knows what was done about what is in it.
const YOUNG: u64 = 600;

/// How long the threads may take to end. One in a call of NVML's that hangs ends with the process.
const LAST_CALL: Duration = Duration::from_secs(2);

/// How long to wait before what failed is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// The threads, which end when it is dropped.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    /// Starts both threads.
    ///
    /// # Errors
    /// There are too many threads.
    pub fn start() -> io::Result<Self> {
        let (stop, teller) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Teller::default())));
        let mut watch = Self { stop: Arc::clone(&stop), threads: Vec::new() };
        let (of_log, by_log) = (Arc::clone(&stop), Arc::clone(&teller));
        let log = thread::Builder::new().name("kernel-log".to_owned());
        watch.threads.push(log.spawn(move || watch_log(&of_log, &by_log))?);
        let nvml = thread::Builder::new().name("health".to_owned());
        watch.threads.push(nvml.spawn(move || nvml_watch::run(&stop, &teller))?);
        Ok(watch)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.threads.iter().for_each(|thread| thread.thread().unpark());
        let deadline = Instant::now() + LAST_CALL;
        while !self.threads.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Acts on the Xids in the kernel's log until it is to stop.
fn watch_log(stop: &AtomicBool, teller: &Mutex<Teller>) {
    let Some((mut log, settled)) = begin(stop) else { return };
    // Of what was there before, a process may have another's pid by now.
    let mut is_new = false;
    while !stop.load(Relaxed) {
        let (mut found, is_end) = log.read();
        found.retain(|xid| xid.sequence > settled && (is_new || !is_of_program(xid.number)));
        let is_read = is_end && !is_new;
        if is_read || !found.is_empty() {
            act(&found, log.last, teller);
        }
        is_new |= is_end;
        log.wait();
    }
}

/// The kernel's log, and up to which record it has been acted on; `None`: it is to stop.
fn begin(stop: &AtomicBool) -> Option<(KernelLog, u64)> {
    let mut told = false;
    while !stop.load(Relaxed) {
        let Ok(config) = config_files::load() else {
            thread::park_timeout(AGAIN);
            continue;
        };
        match KernelLog::open(&config.driver.root) {
            Ok(log) => {
                let records = sick_gpus::read(&config);
                let is_late = records == Records::default() && uptime_seconds() > YOUNG;
                let end = || end_of_log(&config.driver.root).unwrap_or_default();
                return Some((log, if is_late { end() } else { records.settled }));
            }
            Err(error) if !told => {
                tracing::warn!(
                    "the kernel's log cannot be read, so NVML alone tells of GPUs' errors: {error}"
                );
                told = true;
            }
            Err(_) => {}
        }
        thread::park_timeout(12 * AGAIN);
    }
    None
}

/// Acts on `xids`, of which the last are those before record `last`.
fn act(xids: &[Xid], last: u64, teller: &Mutex<Teller>) {
    let Ok(config) = config_files::load() else { return };
    let mut teller = teller.lock().unwrap_or_else(PoisonError::into_inner);
    for xid in xids {
        teller.act_on(xid, true, &config);
    }
    let settle = |records: &mut Records| records.settled = records.settled.max(last);
    if xids.iter().any(|xid| !is_of_program(xid.number)) || sick_gpus::read(&config) == Records::default() {
        let settled = sick_gpus::change(&config, settle);
        let _ = settled.inspect_err(|error| tracing::warn!("health.json: {error}"));
    }
}
