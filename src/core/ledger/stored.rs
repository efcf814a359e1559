//! The text of `ledger.json`: whether it is a ledger, and of which version.

use serde::Deserialize;

use super::{LeaseId, Ledger, SCHEMA};
use crate::parse_errors::plain;
use crate::text::safe;

/// Why a text cannot be used as the ledger.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotALedger {
    /// A newer version of sublet wrote it, with this schema. It is not rebuilt: its content may exist nowhere else.
    Newer(String),
    /// It is no ledger, for this reason.
    Corrupt(String),
}

/// All that is known of a ledger of another version.
#[derive(Deserialize)]
struct OfAnyVersion {
    schema: String,
}

/// Parses `content`. Ids become names of directories and are checked for that.
///
/// # Errors
/// It is not a ledger, or is a newer version's.
pub(super) fn parse(content: &[u8]) -> Result<Ledger, NotALedger> {
    let parsed: Result<Ledger, _> = serde_json::from_slice(content);
    if parsed.as_ref().map_or(true, |ledger| ledger.schema != SCHEMA) {
        if let Some(newer) = newer_schema(content) {
            return Err(NotALedger::Newer(newer));
        }
    }
    let mut ledger = parsed.map_err(|error| NotALedger::Corrupt(plain(&error.to_string(), None)))?;
    let resolved = ledger.resolve_mount_points();
    resolved.ok_or_else(|| NotALedger::Corrupt("a lease has mount points that are not listed".to_owned()))?;
    check(&ledger).map_err(NotALedger::Corrupt)?;
    Ok(ledger)
}

/// The text of `ledger`, which is the same afterwards.
///
/// # Errors
/// It has a path that is not UTF-8.
pub(super) fn text(ledger: &mut Ledger) -> serde_json::Result<Vec<u8>> {
    ledger.number_mount_points();
    let text = serde_json::to_vec(ledger);
    // Each number is that of a list.
    let _ = ledger.resolve_mount_points();
    text
}

/// The schema, if it has our name and a higher number.
fn newer_schema(content: &[u8]) -> Option<String> {
    let OfAnyVersion { schema } = serde_json::from_slice(content).ok()?;
    let number = |schema: &str| {
        let (name, number) = schema.split_once('/')?;
        let number: u64 = number.parse().ok()?;
        Some((name.to_owned(), number))
    };
    let ((found, found_number), (ours, our_number)) = (number(&schema)?, number(SCHEMA)?);
    (found == ours && found_number > our_number).then(|| safe(&schema))
}

fn check(ledger: &Ledger) -> Result<(), String> {
    if ledger.schema != SCHEMA {
        return Err(format!("its schema is {}, but {SCHEMA} is expected", safe(&ledger.schema)));
    }
    let bad_id = ledger.leases.iter().find(|lease| LeaseId::parse(lease.id.as_str()).is_none());
    if let Some(lease) = bad_id {
        return Err(format!("{} is not a lease id", safe(lease.id.as_str())));
    }
    let wanted = ledger.leases.iter().filter_map(|lease| lease.daemon.as_ref());
    let mut keys = wanted.chain(ledger.daemons.iter().map(|daemon| &daemon.key));
    match keys.find(|key| key.0.is_empty() || key.0.starts_with('.') || key.0.contains('/')) {
        Some(key) => Err(format!("{} is not the key of an MPS daemon", safe(&key.0))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_higher_number_of_our_schema_is_a_newer_version() {
        for (schema, newer) in [
            ("sublet.ledger/2", true),
            ("sublet.ledger/10", true),
            ("sublet.ledger/0", false),
            ("sublet.ledger/", false),
            ("sublet.ledger/-2", false),
            ("sublet.ledger", false),
            ("sublet.inventory/9", false),
            ("", false),
        ] {
            // Such a text may have nothing else in common with ours.
            for rest in [
                r#","leases":{"a":7}"#,
                r#","boot_id":"b","leases":[],"daemons":[],"compute_modes":[],"drained":[],"unexplained":[]"#,
            ] {
                let text = format!(r#"{{"schema":"{schema}"{rest}}}"#);
                let outcome = parse(text.as_bytes()).unwrap_err();
                assert_eq!(outcome == NotALedger::Newer(schema.to_owned()), newer, "{text}: {outcome:?}");
            }
        }
        let cut_off = parse(br#"{"schema":"sublet.ledger/2","leases":"#);
        assert!(matches!(cut_off, Err(NotALedger::Corrupt(_))), "{cut_off:?}");
    }
}
