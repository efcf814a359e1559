//! The word in `"reason"` of an error in JSON (`--format json`). docs/explain.md lists them all. Words may be added,
//! and none is ever renamed. And the errors of `sublet explain`, which are known by their words alone.

use crate::advise::AdviseError;
use crate::bench::ResultError;
use crate::names::NoLease;
use crate::stack::{NotPlaced, StackError};
use crate::suspend::SuspendError;
use sublet_core::admit::{AdmitError, of_broker, of_inventory, of_mps};
use sublet_core::config_files::{self, ConfigError};
use sublet_core::ledger::LedgerError;
use sublet_core::oci::{Conflict, FileError, ImageError, SpecError};
use sublet_core::request::RequestError;

/// Why there is nothing to explain.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// No argument says what.
    #[error(
        "nothing to explain: give a share, such as sm=25 memory=8GiB, or --annotation KEY=VALUE, --bundle DIR, \
         --name NAME, --container CONTAINER, --compose FILE or --quadlet FILE"
    )]
    Nothing,
    /// A container without annotations that no rule matches.
    #[error("it has no sublet.* annotation and no rule of {0} matches it, so it gets no GPU")]
    NoShare(String),
    /// A container of which nothing is recorded.
    #[error(
        "container {0} holds no lease, and neither an earlier one, nor a refusal, nor an action of the guard is \
         recorded for it; earlier ones are shown to root alone"
    )]
    NoContainer(String),
}

/// The word for `error`, by the first of its causes that has one.
pub fn reason(error: &anyhow::Error) -> &'static str {
    error.chain().find_map(known).unwrap_or("other")
}

fn known(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    let of_one_kind = [
        (error.is::<ResultError>() || error.is::<StackError>(), "bad-file"),
        (error.is::<LedgerError>(), "state"),
        (error.is::<RequestError>(), "bad-request"),
        (error.is::<ConfigError>(), "bad-configuration"),
        (error.is::<Conflict>(), "conflict"),
        (error.is::<ImageError>(), "bad-image"),
        (error.is::<SpecError>() || error.is::<FileError>(), "bad-bundle"),
        (matches!(error.downcast_ref::<NoLease>(), Some(NoLease::None(_))), "no-container"),
        (error.is::<NoLease>(), "ambiguous"),
        (matches!(error.downcast_ref::<ExplainError>(), Some(ExplainError::Nothing)), "bad-usage"),
        (matches!(error.downcast_ref::<ExplainError>(), Some(ExplainError::NoShare(_))), "no-share"),
        (error.is::<ExplainError>(), "no-container"),
    ];
    (of_one_kind.into_iter().find_map(|(is, word)| is.then_some(word)))
        .or_else(|| error.downcast_ref().map(of_admission))
        .or_else(|| error.downcast_ref().map(of_suspension))
        .or_else(|| error.downcast_ref().map(of_inventory))
        .or_else(|| error.downcast_ref().map(of_mps))
        .or_else(|| error.downcast_ref().map(of_broker))
        .or_else(|| error.downcast_ref().map(of_advice))
}

/// The word for a refusal. `sublet refresh` ran as a program of its own: what it failed with is found again.
fn of_admission(error: &AdmitError) -> &'static str {
    let AdmitError::Own(_) = error else { return error.reason() };
    match config_files::load().map(|config| sublet_core::inventory::fingerprint(&config)) {
        Ok(Err(error)) => of_inventory(&error),
        _ => "driver",
    }
}

fn of_suspension(error: &SuspendError) -> &'static str {
    if let SuspendError::Admit(error) = error { of_admission(error) } else { error.reason() }
}

/// The word for a question that has no answer.
const fn of_advice(error: &AdviseError) -> &'static str {
    match error {
        AdviseError::NoGpu | AdviseError::NotThatGpu { .. } | AdviseError::Memory { .. } => "never-fits",
        AdviseError::Result(_) => "bad-file",
        AdviseError::Tenants(_) | AdviseError::P99 | AdviseError::Load(_) | AdviseError::LoadOfNothing => {
            "bad-usage"
        }
    }
}

/// The word for a container of a stack that gets no share.
pub fn of_service(error: &NotPlaced) -> &'static str {
    match error {
        NotPlaced::Refused(error) => of_admission(error),
        NotPlaced::Runtime(_) | NotPlaced::Labels(_) | NotPlaced::Dropped(_) => "not-by-sublet",
        NotPlaced::Cdi(_) => "cdi",
        NotPlaced::Unnamed => "bad-file",
        NotPlaced::Unforeseen => "no-mig-device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errors_first_known_cause_gives_the_word() {
        let ledger = || LedgerError::Locked { path: "/x".to_owned(), seconds: 5 };
        assert_eq!(reason(&anyhow::Error::new(ledger()).context("while looking")), "state");
        assert_eq!(reason(&AdmitError::from(ledger()).into()), "state");
        assert_eq!(reason(&ExplainError::Nothing.into()), "bad-usage");
        assert_eq!(reason(&NoLease::None("x".to_owned()).into()), "no-container");
        assert_eq!(reason(&anyhow::anyhow!("something")), "other");
    }

    #[test]
    fn every_word_is_documented() {
        let documented = include_str!("../../../docs/explain.md");
        let (ours, _) = include_str!("reason.rs").split_once("#[cfg(test)]").unwrap();
        let (_, admission) = include_str!("../../core/admit/error.rs").split_once("pub fn reason(").unwrap();
        let (admission, _) = admission.split_once("#[cfg(test)]").unwrap();
        let (_, suspension) = include_str!("../suspend/error.rs").split_once("pub fn reason(").unwrap();
        let source = format!("{ours}{admission}{suspension}");
        let words = source.split('"').skip(1).step_by(2).filter(|text| !text.contains([' ', '.', '`', '\n']));
        let missing: Vec<&str> = words
            .filter(|word| !word.starts_with("reason") && !documented.contains(&format!("| `{word}` |")))
            .collect();
        assert_eq!(missing, Vec::<&str>::new());
    }
}
