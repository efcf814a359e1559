//! Faults that a service finds again and again: it warns of each once for as long as it stays.

use std::sync::{Mutex, PoisonError};

/// The faults that were there at the last look.
pub(crate) struct KnownFaults(Mutex<Vec<String>>);

impl KnownFaults {
    /// There were none.
    pub const fn none() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Whether there were any.
    pub fn any(&self) -> bool {
        !self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Warns of those of `faults` that are new, and with the line `over` when there are none any more. Each is what it is of, by
    /// which it is known, and a line, whose figures may change.
    pub fn warn<K: ToString>(&self, faults: impl IntoIterator<Item = (K, String)>, over: &str) {
        self.news(faults, over).iter().for_each(|line| tracing::warn!("{line}"));
    }

    fn news<K: ToString>(&self, faults: impl IntoIterator<Item = (K, String)>, over: &str) -> Vec<String> {
        let mut before = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, lines): (Vec<String>, Vec<String>) =
            faults.into_iter().map(|(of, line)| (of.to_string(), line)).unzip();
        let is_over = now.is_empty() && !before.is_empty();
        let new = now.iter().zip(lines).filter(|(of, _)| !before.contains(of)).map(|(_, line)| line);
        let news = new.chain(is_over.then(|| over.to_owned())).collect();
        *before = now;
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_warned_of_once_and_again_after_it_was_over() {
        let known = KnownFaults::none();
        let news =
            |faults: &[&str]| known.news(faults.iter().map(|fault| (fault, (*fault).to_owned())), "well");
        assert_eq!(news(&[]), [""; 0], "there was none");
        assert_eq!(news(&["full"]), ["full"]);
        assert_eq!(news(&["full"]), [""; 0]);
        assert_eq!(news(&["full", "broken"]), ["broken"]);
        assert_eq!(news(&["broken"]), [""; 0]);
        assert_eq!(news(&[]), ["well"]);
        assert_eq!(news(&[]), [""; 0]);
        assert_eq!(news(&["full"]), ["full"]);
        assert_eq!(known.news([("full", "full, 7 MiB".to_owned())], "well"), [""; 0], "the same fault");
    }
}
