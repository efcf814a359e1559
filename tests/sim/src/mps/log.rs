//! `control.log` and `server.log`, in the format of the real programs.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// A log file in `CUDA_MPS_LOG_DIRECTORY`.
#[derive(Debug)]
pub struct Log {
    file: PathBuf,
    source: &'static str,
}

impl Log {
    /// The log `file`. The program appears in it as `source`.
    pub fn new(file: &str, source: &'static str) -> Self {
        let directory = std::env::var_os("CUDA_MPS_LOG_DIRECTORY");
        let directory = directory.map_or_else(|| "/var/log/nvidia-mps".into(), PathBuf::from);
        Self { file: directory.join(file), source }
    }

    /// Writes a line. Errors are ignored.
    pub fn line(&self, text: &str) {
        let line = format!("[{} {} {:5}] {text}\n", now(), self.source, std::process::id());
        let file = OpenOptions::new().append(true).create(true).open(&self.file);
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86400, since.as_secs() % 86400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let millis = since.subsec_millis();
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{millis:03}")
}

/// The civil date of a day counted from 1970-01-01.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march + 2) / 5 + 1;
    let month = if march < 10 { march + 3 } else { march - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn days_are_dates() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(19_782), (2024, 2, 29));
        assert_eq!(date(20_778), (2026, 11, 21));
    }
}
