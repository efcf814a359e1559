//! The schemas of JSON outputs (JSON Schema 2020-12), made from the types that are printed. They are kept in
//! docs/schema.

use std::path::{Path, PathBuf};

use schemars::Schema;

use crate::mps_daemons::Listed;
use crate::status::{LeaseOnDevice, Status};

/// The name of each file, and its schema.
fn all() -> [(&'static str, Schema); 3] {
    [
        ("status.json", schemars::schema_for!(Status)),
        ("lease-list.json", schemars::schema_for!(Vec<LeaseOnDevice>)),
        ("mps-list.json", schemars::schema_for!(Vec<Listed>)),
    ]
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema")
}

/// `SUBLET_SCHEMAS=1` writes them anew.
#[test]
fn the_schemas_in_docs_are_those_of_the_types() {
    for (name, schema) in all() {
        let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
        let file = directory().join(name);
        if std::env::var_os("SUBLET_SCHEMAS").is_some() {
            std::fs::write(&file, text).unwrap();
            continue;
        }
        let kept = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(kept == text, "{} differs: SUBLET_SCHEMAS=1 cargo test -p sublet schemas", file.display());
    }
}
