//! `sublet wait`: waits until the driver is up and, with annotations, until their share is free.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::preview::preview;
use sublet_core::admit::{AdmitError, Local, fresh_inventory, is_remote};
use sublet_core::config::Config;
use sublet_core::ledger::{LeaseId, Store};
use sublet_core::request::{self, Request};
use sublet_core::share::units::{DURATION_ALLOWED, parse_duration};

/// A day. The clock can represent this far ahead.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// The pause between two attempts.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Arguments of `sublet wait`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// An annotation of the share to wait for. With none, wait for the driver alone
    #[arg(long = "annotation", value_parser = super::annotation, value_name = "KEY=VALUE")]
    annotations: Vec<(String, String)>,
    /// The longest wait, such as 30s or 2m; at most a day
    #[arg(long, default_value = "60s", value_parser = timeout)]
    timeout: Duration,
}

fn timeout(text: &str) -> Result<Duration, String> {
    let allowed = || format!("must be {DURATION_ALLOWED}, at most a day");
    parse_duration(text, LONGEST).map_err(|malformed| malformed.hint.unwrap_or_else(allowed))
}

/// Runs it.
///
/// # Errors
/// The time is up; the message is the last refusal.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    let annotations = arguments.annotations.iter().cloned().collect();
    let request = if arguments.annotations.is_empty() {
        None
    } else {
        Some(request::parse(&annotations, None, None, config)?)
    };
    let deadline = Instant::now() + arguments.timeout;
    loop {
        match look(request.as_ref(), config) {
            // An instance would be created.
            Ok(()) | Err(AdmitError::WouldMake { .. }) => return Ok(ExitCode::SUCCESS),
            Err(
                error @ (AdmitError::Refused(_) | AdmitError::PolicyLimit(_) | AdmitError::Unmade { .. }),
            ) if !error.is_temporary() => {
                return Err(error.into());
            }
            Err(error) if Instant::now() >= deadline => return Err(error.into()),
            Err(_) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

fn look(request: Option<&Request>, config: &Config) -> Result<(), AdmitError> {
    let inventory = fresh_inventory(config)?;
    let Some(request) = request else { return Ok(()) };
    let store = Store::open(&config.state_dir)?;
    if !is_remote(config) {
        match Local::new(config).update(|_| ()) {
            Ok(()) => {}
            // Nothing more can be known here than what the error says.
            Err(error) if error.is_elsewhere() => {}
            Err(error) => return Err(error.into()),
        }
    }
    let id = LeaseId::random().map_err(AdmitError::Random)?;
    preview(request, &id, &inventory, &store.peek()?, config)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_written_as_a_wait_is() {
        assert_eq!(timeout("0"), Ok(Duration::ZERO));
        assert_eq!(timeout("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(timeout("10").unwrap_err(), "the unit is missing: write 10s");
        for text in ["soon", "1m 30s", "1441m", "18446744073709551615s"] {
            let why = timeout(text).unwrap_err();
            assert_eq!(
                why, "must be 0 or a whole number of ms, s or m, such as 10s, at most a day",
                "{text}"
            );
        }
    }
}
