//! Finds the lease that somebody means: by the container's name, its id, the lease's id, or a prefix of these.

use super::Names;
use sublet_core::ledger::{Lease, Ledger};
use sublet_core::text::safe;

/// The text means no lease, or several.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLease {
    /// None.
    #[error("no container with a lease is called {0}: `sublet lease list` shows names and ids")]
    None(String),
    /// More than one.
    #[error("{text} means several containers: {}; give more of one of them", matches.join(", "))]
    Several {
        /// What was asked for.
        text: String,
        /// Each as `NAME (lease ID)`.
        matches: Vec<String>,
    },
}

/// The lease that `text` means. What it names in full goes before what it is a prefix of.
pub fn lease_of<'l>(text: &str, ledger: &'l Ledger, names: &Names) -> Result<&'l Lease, NoLease> {
    let labels = |lease: &Lease| {
        let name = names.of(lease).map(|name| name.name.clone()).unwrap_or_default();
        [lease.id.to_string(), lease.container.id.clone(), name]
    };
    let all = |means: &dyn Fn(&str) -> bool| -> Vec<&'l Lease> {
        ledger.leases.iter().filter(|lease| labels(lease).iter().any(|label| means(label))).collect()
    };
    let mut found = if text.is_empty() { Vec::new() } else { all(&|label| label == text) };
    if found.is_empty() && !text.is_empty() {
        found = all(&|label| label.starts_with(text));
    }
    match found[..] {
        [] => Err(NoLease::None(safe(text))),
        [one] => Ok(one),
        _ => {
            let shown = |lease: &&Lease| {
                let name = names.of(lease).map(|name| name.name.as_str()).filter(|name| !name.is_empty());
                format!("{} (lease {})", safe(name.unwrap_or(&lease.container.name())), lease.id)
            };
            Err(NoLease::Several { text: safe(text), matches: found.iter().map(shown).collect() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Ended, Known, Name};
    use super::*;
    use sublet_core::ledger::fixture::lease;

    /// Leases 1 to 3; the containers are c1, c2 and c3, the first two named `web-1` and `web`.
    fn world() -> (Ledger, Names) {
        let leases = [1, 2, 3].map(|number| {
            let mut lease = lease(number, "GPU-0");
            lease.container.id = format!("c{number}");
            lease
        });
        let known = |name: &str| Known {
            seen: 0,
            container_id: String::new(),
            name: Name { name: name.to_owned(), ..Name::default() },
        };
        let names = [("web-1", 0), ("web", 1)].map(|(name, at)| (leases[at].id.to_string(), known(name)));
        (Ledger { leases: leases.to_vec(), ..Ledger::empty("boot") }, Names(names.into()))
    }

    #[test]
    fn a_name_an_id_and_a_unique_prefix_are_understood() {
        let (ledger, names) = world();
        let found = |text: &str| lease_of(text, &ledger, &names).map(|lease| lease.container.id.as_str());
        assert_eq!(found("web-1"), Ok("c1"));
        assert_eq!(found("web"), Ok("c2"), "in full, before the prefix of another");
        assert_eq!(found("web-"), Ok("c1"));
        assert_eq!(found("c3"), Ok("c3"));
        assert_eq!(found(ledger.leases[2].id.as_str()), Ok("c3"));
    }

    #[test]
    fn none_and_several_are_said() {
        let (ledger, names) = world();
        let error = |text: &str| lease_of(text, &ledger, &names).unwrap_err();
        assert_eq!(error("x\u{1b}"), NoLease::None("x\\u{1b}".to_owned()));
        assert_eq!(error(""), NoLease::None(String::new()));
        let NoLease::Several { matches, .. } = error("c") else { panic!("c means three") };
        assert_eq!(matches.len(), 3);
        assert!(
            matches[0].starts_with("web-1 (lease ") && matches[2].starts_with("c3 (lease "),
            "{matches:?}"
        );
    }

    #[test]
    fn a_container_that_has_ended_is_found_by_name_and_id_the_last_one_first() {
        let (ledger, mut names) = world();
        let mut end = |number: u64, name: &str| {
            let name = Name { name: name.to_owned(), ..Name::default() };
            let known = Known { seen: number, container_id: format!("c{number}"), name };
            names.0.insert(lease(number, "GPU-0").id.to_string(), known);
        };
        end(7, "job");
        end(9, "job");
        end(8, "jobs");
        let found =
            |text: &str| names.ended(text, &ledger).into_iter().map(Ended::container_id).collect::<Vec<_>>();
        assert_eq!(found("job"), ["c9", "c7"], "in full, before what it is a prefix of");
        assert_eq!(found("jobs"), ["c8"]);
        assert_eq!(found("jo"), ["c9", "c8", "c7"]);
        assert_eq!(found("c7"), ["c7"]);
        assert_eq!((found("web"), found("")), (vec![], vec![]), "it has not ended");
    }
}
