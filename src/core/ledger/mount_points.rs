//! The list of mount points in a lease: one in memory for all leases that have the same.
//!
//! The driver's files are the same in most containers, and their paths are half of a lease's text. So the ledger's text has
//! each list once, and its leases have the list's number.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Ledger;

/// Files in a root filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPoints(Form);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Form {
    These(Arc<[PathBuf]>),
    /// The number of a list in [`Ledger::mount_point_lists`]. Only in the ledger's text.
    Numbered(usize),
}

impl Deref for MountPoints {
    type Target = [PathBuf];

    fn deref(&self) -> &[PathBuf] {
        match &self.0 {
            Form::These(files) => files,
            Form::Numbered(_) => &[],
        }
    }
}

impl From<Vec<PathBuf>> for MountPoints {
    fn from(files: Vec<PathBuf>) -> Self {
        Self(Form::These(files.into()))
    }
}

impl Default for MountPoints {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl Serialize for MountPoints {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Form::These(files) => serializer.collect_seq(files.iter()),
            Form::Numbered(number) => number.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for MountPoints {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListOrNumber;
        impl<'de> Visitor<'de> for ListOrNumber {
            type Value = MountPoints;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of paths, or the number of one")
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<MountPoints, E> {
                Ok(MountPoints(Form::Numbered(usize::try_from(number).map_err(E::custom)?)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<MountPoints, A::Error> {
                let mut files: Vec<PathBuf> = Vec::new();
                while let Some(file) = list.next_element()? {
                    files.push(file);
                }
                Ok(files.into())
            }
        }
        deserializer.deserialize_any(ListOrNumber)
    }
}

impl Ledger {
    /// Gives each list of its leases a number, for its text.
    pub(super) fn number_mount_points(&mut self) {
        for lease in self.leases.iter_mut().filter(|lease| !lease.mount_points.is_empty()) {
            let Form::These(files) = &lease.mount_points.0 else { continue };
            // Leases that were read from one ledger share a list by its address.
            let lists = &self.mount_point_lists;
            let known = lists
                .iter()
                .position(|list| list.is_same(files))
                .or_else(|| lists.iter().position(|list| **list == **files));
            let number = known.unwrap_or(lists.len());
            let list = std::mem::replace(&mut lease.mount_points, MountPoints(Form::Numbered(number)));
            if known.is_none() {
                self.mount_point_lists.push(list);
            }
        }
    }

    /// Gives each lease its list again; `None`: there is no list of some number.
    pub(super) fn resolve_mount_points(&mut self) -> Option<()> {
        let lists = std::mem::take(&mut self.mount_point_lists);
        if !lists.iter().all(MountPoints::are_listed) {
            return None;
        }
        for lease in &mut self.leases {
            if let Form::Numbered(number) = lease.mount_points.0 {
                lease.mount_points = lists.get(number)?.clone();
            }
        }
        Some(())
    }
}

impl MountPoints {
    /// Whether the files themselves are here, and not the number of a list elsewhere.
    pub(super) fn are_listed(&self) -> bool {
        matches!(self.0, Form::These(_))
    }

    fn is_same(&self, files: &Arc<[PathBuf]>) -> bool {
        matches!(&self.0, Form::These(own) if Arc::ptr_eq(own, files))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Lease;
    use super::super::fixture::lease;
    use super::*;
    use crate::ledger::store::{ledger_text, parse_ledger};

    fn ledger(leases: u64) -> Ledger {
        let list = |n: u64| -> MountPoints { vec![format!("/lib/{}", n % 2).into(), "/b".into()].into() };
        let leases = (1..=leases).map(|n| Lease { mount_points: list(n), ..lease(n, "GPU-a") });
        Ledger { leases: leases.collect(), ..Ledger::empty("boot") }
    }

    #[test]
    fn the_text_has_each_list_once() {
        for (leases, lists) in [(0, 0), (1, 1), (9, 2)] {
            let mut ledger = ledger(leases);
            let before = ledger.clone();
            let written = ledger_text(&mut ledger).unwrap();
            assert_eq!(ledger, before, "as it was");
            let value: serde_json::Value = serde_json::from_slice(&written).unwrap();
            assert_eq!(value["mount_point_lists"].as_array().map_or(0, Vec::len), lists);
            let mut read = parse_ledger(&written).unwrap();
            assert_eq!(read, before);
            assert_eq!(ledger_text(&mut read).unwrap(), written);
        }
    }

    #[test]
    fn an_annotation_has_the_files_themselves() {
        let lease = ledger(1).leases.remove(0);
        let text = lease.to_annotation(std::path::Path::new("/run/sublet"));
        assert_eq!(Lease::from_annotation(&text), Some(lease));
        let numbered = text.replace(r#"["/lib/1","/b"]"#, "0");
        assert_ne!(numbered, text);
        assert_eq!(Lease::from_annotation(&numbered), None);
    }

    #[test]
    fn a_number_without_a_list_is_no_ledger() {
        let written = ledger_text(&mut ledger(9)).unwrap();
        let written = String::from_utf8(written).unwrap();
        for (old, new) in [(r#""mount_points":1"#, r#""mount_points":2"#), (r#"["/lib/1","/b"]"#, "1")] {
            assert!(written.contains(old), "{written}");
            assert!(parse_ledger(written.replace(old, new).as_bytes()).is_err(), "{new}");
        }
    }
}
