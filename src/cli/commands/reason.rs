//! The word in `"reason"` of an error in JSON (`--format json`). docs/explain.md lists them all. Words may be added,
//! and none is ever renamed.

use super::explain_error::ExplainError;
use crate::advise::AdviseError;
use crate::bench::ResultError;
use crate::names::NoLease;
use crate::stack::NotPlaced;
use sublet_core::admit::AdmitError;
use sublet_core::admit::reason::{of_broker, of_inventory, of_mps};
use sublet_core::config_files::{self, ConfigError};
use sublet_core::inventory;
use sublet_core::ledger::LedgerError;
use sublet_core::oci::{Conflict, FileError, ImageError, SpecError};
use sublet_core::request::RequestError;

/// The word for an error that has no other.
const OTHER: &str = "other";

/// The word for `error`, by the first of its causes that has one.
pub fn reason(error: &anyhow::Error) -> &'static str {
    error.chain().find_map(known).unwrap_or(OTHER)
}

fn known(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    let error_is = |word: &'static str| Some(word);
    if let Some(error) = error.downcast_ref() {
        return Some(of_admission(error));
    }
    if let Some(error) = error.downcast_ref() {
        return Some(of_inventory(error));
    }
    if let Some(error) = error.downcast_ref() {
        return Some(of_mps(error));
    }
    if let Some(error) = error.downcast_ref() {
        return Some(of_broker(error));
    }
    if let Some(error) = error.downcast_ref() {
        return Some(of_advice(error));
    }
    match () {
        () if error.is::<ResultError>() => error_is("bad-file"),
        () if error.is::<LedgerError>() => error_is("state"),
        () if error.is::<RequestError>() => error_is("bad-request"),
        () if error.is::<ConfigError>() => error_is("bad-configuration"),
        () if error.is::<Conflict>() => error_is("conflict"),
        () if error.is::<ImageError>() => error_is("bad-image"),
        () if error.is::<SpecError>() || error.is::<FileError>() => error_is("bad-bundle"),
        () => match (error.downcast_ref(), error.downcast_ref()) {
            (Some(NoLease::None(_)), _) | (_, Some(ExplainError::NoContainer(_))) => error_is("no-container"),
            (Some(NoLease::Several { .. }), _) => error_is("ambiguous"),
            (_, Some(ExplainError::Nothing)) => error_is("bad-usage"),
            (_, Some(ExplainError::NoShare(_))) => error_is("no-share"),
            (_, Some(ExplainError::Stack(_))) => error_is("bad-file"),
            (None, None) => None,
        },
    }
}

/// The word for a refusal. `sublet refresh` ran as a program of its own: what it failed with is found again.
fn of_admission(error: &AdmitError) -> &'static str {
    if let AdmitError::Own(_) = error { of_refresh() } else { error.reason() }
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
        NotPlaced::Runtime(_) | NotPlaced::Dropped(_) => "not-by-sublet",
        NotPlaced::Cdi(_) => "cdi",
        NotPlaced::Unnamed => "bad-file",
        NotPlaced::Unforeseen => "no-mig-device",
    }
}

/// `sublet refresh` ran as a program of its own, and failed.
fn of_refresh() -> &'static str {
    let fingerprint = config_files::load().map(|config| inventory::fingerprint(&config));
    match fingerprint {
        Ok(Err(error)) => of_inventory(&error),
        _ => "driver",
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
        let source = format!("{ours}{}", include_str!("../../core/admit/reason.rs"));
        let words = source.split('"').skip(1).step_by(2).filter(|text| !text.contains([' ', '.', '`', '\n']));
        let missing: Vec<&str> = words
            .filter(|word| !word.starts_with("reason") && !documented.contains(&format!("| `{word}` |")))
            .collect();
        assert_eq!(missing, Vec::<&str>::new());
    }
}
