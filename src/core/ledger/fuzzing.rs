//! For the fuzz targets: the ledger's file and low-level runtimes' records, read from bytes.

use std::path::Path;

use super::{Ledger, LedgerError, runtime_record, store};

/// The ledger in `content`, as the store reads it.
pub fn ledger(content: &[u8]) -> Result<Ledger, String> {
    store::parse_ledger(content, Path::new("")).map_err(|error| match error {
        LedgerError::Newer { found: why, .. } | LedgerError::Corrupt { why, .. } => why,
        error => error.to_string(),
    })
}

/// Reads `content` as runc's record and as each of crun's. A cgroup in it must be below the cgroup mount.
///
/// # Panics
/// It is not.
pub fn records(content: &[u8]) {
    let of_runc = runtime_record::parse(content).map(runtime_record::from_runc);
    let annotations = runtime_record::parse::<runtime_record::CrunConfig>(content)
        .ok()
        .and_then(|config| config.annotations);
    let of_crun = runtime_record::parse(content)
        .map(|status| runtime_record::from_crun(status, annotations.unwrap_or_default()));
    for record in of_runc.into_iter().chain(of_crun) {
        if let Some(cgroup) = record.cgroup {
            assert!(
                cgroup.starts_with("/sys/fs/cgroup") && cgroup != Path::new("/sys/fs/cgroup"),
                "{}",
                cgroup.display()
            );
            assert!(!cgroup.components().any(|part| part.as_os_str() == ".."), "{}", cgroup.display());
        }
    }
}
