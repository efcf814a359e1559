//! The schemas of JSON outputs (JSON Schema 2020-12), made from the types that are printed. They are kept in
//! docs/schema.

use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema};
use sublet_core::events::{Event, Kind};

use super::bench_show::Comparison;
use super::explain::{OfContainer, OfShare, OfStack};
use super::mig::Planned;
use super::mig_list::ListedGpu;
use super::setup::Checked;
use super::status::LastRefusal;
use super::suspend::Stepped;
use super::{ErrorObject, advise, cdi, doctor};
use crate::accounting::Report;
use crate::bench::BenchResult;
use crate::mps_daemons::Listed;
use crate::status::{LeaseOnDevice, Status};

// The library's type has no schema, because the programs that start containers would carry it.
/// One line of `sublet events --format json`.
#[derive(JsonSchema)]
#[schemars(rename = "Event")]
#[expect(dead_code, reason = "it exists for its schema")]
struct EventKeys {
    /// RFC 3339 in UTC, with milliseconds.
    time: String,
    /// The same in milliseconds since boot, which no clock that is set changes.
    uptime_ms: u64,
    /// What happened: docs/events.md.
    kind: String,
    /// The uid of the container's engine; root's where there is no container.
    uid: u32,
    /// The container's id; if it is unknown, its bundle or root filesystem.
    #[schemars(default)]
    container_id: String,
    /// What people call the container, where that is known.
    name: Option<String>,
    #[schemars(default)]
    lease: String,
    /// Whom `sublet.owner` of a container of root's engine names.
    #[schemars(default)]
    owner: String,
    /// UUIDs.
    #[schemars(default)]
    devices: Vec<String>,
    /// The MPS daemon's key.
    #[schemars(default)]
    daemon: String,
    /// Of a lease that was taken or bound: from the start of the process that takes it to its taking, or to the start of
    /// the container's first process. Of one that ended: since it was taken.
    took_ms: Option<u64>,
    /// Of a refusal: the word for it, as in JSON errors. Of an action of the guard: the offence. Of a GPU's error: `xid-31`.
    #[schemars(default)]
    reason: String,
    /// What the guard did: `report`, `terminate` or `container`.
    #[schemars(default)]
    action: String,
    /// The event in one line.
    #[schemars(default)]
    text: String,
}

// sublet-share runs in containers and is linked with nothing.
/// What `sublet-share --format json` prints in a container. A value that was not given is `null`.
#[derive(JsonSchema)]
#[schemars(rename = "Share")]
#[expect(dead_code, reason = "it exists for its schema")]
struct ShareKeys {
    /// `sublet.share/1`.
    schema: String,
    /// `mps`, `time-slice`, `exclusive`, `mig`.
    mode: Option<String>,
    /// UUIDs of the GPUs and MIG devices.
    devices: Vec<String>,
    /// The most of the SMs that each process may use; `null` without a limit.
    sm_percent: Option<f64>,
    /// The most memory that each process may take; `null` without a limit.
    memory_bytes: Option<u64>,
    /// What all its processes have taken, by nvidia-smi.
    used_bytes: Option<u64>,
    /// How many processes the share is for.
    processes: Option<u32>,
    /// Other containers on the same devices when this one started.
    neighbours: Option<u32>,
}

/// The name of each file, and its schema.
fn all() -> [(&'static str, Schema); 21] {
    [
        ("status.json", schemars::schema_for!(Status)),
        ("last-error.json", schemars::schema_for!(Option<LastRefusal>)),
        ("lease-list.json", schemars::schema_for!(Vec<LeaseOnDevice>)),
        ("suspend.json", schemars::schema_for!(Vec<Stepped>)),
        ("mps-list.json", schemars::schema_for!(Vec<Listed>)),
        ("mig-list.json", schemars::schema_for!(Vec<ListedGpu<'_>>)),
        ("mig-plan.json", schemars::schema_for!(Vec<Planned>)),
        ("explain.json", schemars::schema_for!(OfShare<'_>)),
        ("explain-stack.json", schemars::schema_for!(OfStack<'_>)),
        ("explain-container.json", schemars::schema_for!(OfContainer)),
        ("advise.json", schemars::schema_for!(advise::Document<'_>)),
        ("report.json", schemars::schema_for!(Report)),
        ("events.json", schemars::schema_for!(EventKeys)),
        ("cdi-list.json", schemars::schema_for!(cdi::Document<'_>)),
        ("doctor.json", schemars::schema_for!(doctor::Document<'_>)),
        ("doctor-run.json", schemars::schema_for!(doctor::Probed)),
        ("setup-check.json", schemars::schema_for!(Checked<'_>)),
        ("bench.json", schemars::schema_for!(BenchResult)),
        ("bench-comparison.json", schemars::schema_for!(Comparison)),
        ("share.json", schemars::schema_for!(ShareKeys)),
        ("error.json", schemars::schema_for!(ErrorObject<'_>)),
    ]
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema")
}

/// `SUBLET_SCHEMAS=1` writes them anew.
#[test]
fn the_schemas_in_docs_are_made_from_the_types() {
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

#[test]
fn every_schema_is_in_the_documentation_and_no_other_file_is_beside_them() {
    let documented = include_str!("../../../docs/explain.md");
    let names: Vec<&str> = all().iter().map(|(name, _)| *name).collect();
    let missing: Vec<_> = names.iter().filter(|name| !documented.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
    for entry in directory().read_dir().unwrap() {
        let name = entry.unwrap().file_name();
        assert!(names.iter().any(|known| name == *known), "{}", name.display());
    }
}

#[test]
fn an_event_has_the_keys_of_its_schema() {
    let text = || "x".to_owned();
    let event = Event {
        container_id: text(),
        lease: text(),
        owner: text(),
        devices: vec![text()],
        daemon: text(),
        took_ms: Some(1),
        reason: text(),
        action: text(),
        text: text(),
        ..Event::now(Kind::Guard)
    };
    let mut event = serde_json::to_value(event).unwrap();
    // It is not recorded, but learnt when it is printed.
    event["name"] = text().into();
    let schema = serde_json::to_value(schemars::schema_for!(EventKeys)).unwrap();
    let keys = |value: &serde_json::Value| {
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys
    };
    assert_eq!(keys(&event), keys(&schema["properties"]));
    let bare = serde_json::to_value(Event::now(Kind::Guard)).unwrap();
    let mut required: Vec<&str> =
        schema["required"].as_array().unwrap().iter().map(|key| key.as_str().unwrap()).collect();
    required.sort_unstable();
    assert_eq!(keys(&bare), required);
}
