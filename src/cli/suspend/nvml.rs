//! NVML, for a step of a suspension: it is waited for with a limit.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nvml_wrapper::Nvml;

use super::SuspendError;
use crate::probe::{self, ProbeError};
use sublet_core::config::Config;
use sublet_core::inventory::Inventory;

/// How long NVML is waited for: as long as a refresh is.
const LONGEST_ANSWER: Duration = Duration::from_secs(60);

/// Of so many, one after the other would wait in vain.
const MOST_ASKING: usize = 4;

/// NVML, and the `known` inventory with what it says of each GPU now, where each answers.
pub(super) fn ask_nvml(known: Inventory, config: &Config) -> Result<(Nvml, Option<Inventory>), SuspendError> {
    static ASKING: AtomicUsize = AtomicUsize::new(0);
    let unknown =
        |why: &dyn std::fmt::Display| SuspendError::Unknown(format!("what runs on its GPU ({why})"));
    let config = config.clone();
    let ask = move || {
        let (nvml, _) = probe::connect(&config)?;
        let now = probe::renew(&known, &nvml).ok();
        Ok::<_, ProbeError>((nvml, now))
    };
    let answer = answer_within(LONGEST_ANSWER, &ASKING, ask);
    answer.map_err(|why| unknown(&why))?.map_err(|error| unknown(&error))
}

/// What `ask` returns, in time. A driver may hang with a GPU that has nothing to do with the question: a thread then stays behind,
/// of `asking`, and with [`MOST_ASKING`] nothing is asked.
fn answer_within<T: Send + 'static>(
    limit: Duration,
    asking: &'static AtomicUsize,
    ask: impl FnOnce() -> T + Send + 'static,
) -> Result<T, &'static str> {
    if asking.load(Ordering::Relaxed) >= MOST_ASKING {
        return Err("the driver has not answered for a while");
    }
    asking.fetch_add(1, Ordering::Relaxed);
    let (answer, answered) = mpsc::channel();
    thread::spawn(move || {
        let asked = ask();
        asking.fetch_sub(1, Ordering::Relaxed);
        let _ = answer.send(asked);
    });
    answered.recv_timeout(limit).map_err(|_| "the driver does not answer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_hangs_is_left_alone_and_after_some_such_it_is_not_asked() {
        static ASKING: AtomicUsize = AtomicUsize::new(0);
        let limit = Duration::from_millis(10);
        assert_eq!(answer_within(Duration::from_secs(60), &ASKING, || 7), Ok(7));
        let (end, ends) = mpsc::channel::<()>();
        let ends = std::sync::Arc::new(std::sync::Mutex::new(ends));
        for _ in 0..MOST_ASKING {
            let ends = ends.clone();
            let hang = move || ends.lock().is_ok_and(|ends| ends.recv().is_ok());
            assert_eq!(answer_within(limit, &ASKING, hang), Err("the driver does not answer"));
        }
        let refused = answer_within(limit, &ASKING, || true);
        assert_eq!(refused, Err("the driver has not answered for a while"));
        drop(end);
        while ASKING.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        assert_eq!(answer_within(Duration::from_secs(60), &ASKING, || 8), Ok(8));
    }
}
