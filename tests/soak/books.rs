//! The accounts of docs/design.md ("Bookings"), kept once more and from the ledger's text alone: what may never be
//! exceeded, and whether there certainly was room for a container that was refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::plan::{Share, Use};

/// MiB of a whole GPU of gpus.toml, and of it that is never booked.
const MEMORY_MIB: u64 = 143_771;
const RESERVE_MIB: u64 = 512;
/// What an MPS server takes itself.
const SERVER_MIB: u64 = 66;
/// Contexts of containers that booked no memory take some all the same: only with so much to spare there certainly was
/// room.
const SPARE_MIB: u64 = 10_240;
const TURNS: usize = 8;
const CLIENTS: u64 = 48;

/// The ledger as it is on disk now; `None` if there is none or it is being replaced.
pub fn read(state_dir: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(state_dir.join("ledger.json")).ok()?).ok()
}

pub fn leases(ledger: &Value) -> &[Value] {
    ledger["leases"].as_array().map_or(&[], Vec::as_slice)
}

pub fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

/// The lease of the container `id`.
pub fn lease_of<'a>(ledger: &'a Value, id: &str) -> Option<&'a Value> {
    leases(ledger).iter().find(|lease| lease["container"]["id"] == id)
}

fn devices(lease: &Value) -> impl Iterator<Item = &str> {
    lease["devices"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn use_of(lease: &Value) -> Use {
    match (text(lease, "mode"), text(lease, "isolation")) {
        ("exclusive", _) => Use::Exclusive,
        ("mig", _) => Use::Mig,
        ("mps", "shared") => Use::Mps,
        _ => Use::TimeSlice,
    }
}

/// What is booked on one device.
#[derive(Default)]
struct Booked<'a> {
    uses: Vec<Use>,
    sm: u64,
    memory_mib: u64,
    processes: u64,
    servers: BTreeSet<&'a str>,
}

fn booked<'a>(leases: impl Iterator<Item = &'a Value>) -> BTreeMap<&'a str, Booked<'a>> {
    let mut all: BTreeMap<&str, Booked<'_>> = BTreeMap::new();
    for lease in leases {
        for device in devices(lease) {
            let entry = all.entry(device).or_default();
            entry.uses.push(use_of(lease));
            if use_of(lease) == Use::Mps {
                entry.sm += lease["sm"].as_u64().unwrap_or(0);
            }
            entry.memory_mib += lease["memory_bytes"].as_u64().unwrap_or(0) >> 20;
            if let Some(server) = lease["daemon"].as_str() {
                entry.servers.insert(server);
                entry.processes += lease["processes"].as_u64().unwrap_or(0);
            }
        }
    }
    all
}

impl Booked<'_> {
    fn memory(&self) -> u64 {
        self.memory_mib + SERVER_MIB * self.servers.len() as u64
    }

    /// What is wrong with it on a device with so much memory.
    fn excess(&self, device: &str) -> Vec<String> {
        let mut found = Vec::new();
        let first = self.uses[0];
        if self.uses.iter().any(|other| *other != first) {
            found.push(format!("{device} has several uses at once: {:?}", self.uses));
        }
        let most = match first {
            Use::Exclusive | Use::Mig => 1,
            Use::TimeSlice => TURNS,
            Use::Mps => usize::MAX,
        };
        if self.uses.len() > most {
            found.push(format!("{device} has {} leases in use {first:?}", self.uses.len()));
        }
        if self.sm > 100_000 {
            found.push(format!("{device} has {} thousandths of a percent SM booked", self.sm));
        }
        if self.processes > CLIENTS {
            found.push(format!("{device} has {} MPS clients booked", self.processes));
        }
        if device.starts_with("GPU-") && self.memory() > MEMORY_MIB - RESERVE_MIB {
            found.push(format!("{device} has {} MiB booked", self.memory()));
        }
        found
    }

    fn takes(&self, share: &Share) -> bool {
        let same = self.uses.iter().all(|use_| *use_ == share.used_as);
        let room = match share.used_as {
            Use::Exclusive | Use::Mig => self.uses.is_empty(),
            Use::TimeSlice => self.uses.len() < TURNS,
            Use::Mps => self.sm + share.sm <= 100_000 && self.processes + share.processes <= CLIENTS,
        };
        let memory = self.memory() + share.memory_mib + SERVER_MIB * share.servers;
        same && room && memory + SPARE_MIB <= MEMORY_MIB - RESERVE_MIB
    }
}

/// Every limit that the ledger's leases exceed.
pub fn overcommitted(ledger: &Value) -> Vec<String> {
    booked(leases(ledger).iter()).iter().flat_map(|(device, booked)| booked.excess(device)).collect()
}

fn names(ledger: &Value, member: &str, device: &str) -> bool {
    ledger[member].as_array().is_some_and(|all| all.iter().any(|each| each == device))
}

/// Whether there was room for `share` whatever happened between the ledgers `before` and `after`, while others asked
/// for `asked` GPUs in all. MIG devices are not counted: `None` for a share that needs one.
pub fn had_room(share: &Share, before: &Value, after: &Value, asked: usize) -> Option<bool> {
    if share.gpus == 0 {
        return None;
    }
    // A lease that was there at both times counts once.
    let mut all: BTreeMap<&str, &Value> = BTreeMap::new();
    for lease in leases(before).iter().chain(leases(after)) {
        all.insert(text(lease, "id"), lease);
    }
    let booked = booked(all.into_values());
    let free = (0..4).map(gpu).filter(|gpu| {
        let closed = ["drained", "unexplained"]
            .iter()
            .any(|member| names(before, member, gpu) || names(after, member, gpu));
        !closed && booked.get(gpu.as_str()).is_none_or(|booked| booked.takes(share))
    });
    Some(free.count() >= share.gpus + asked)
}

/// The UUID of a GPU of gpus.toml.
pub fn gpu(number: usize) -> String {
    format!("GPU-5b1e7000-0000-4000-8000-0000000009{number:02}")
}

/// Whether the process of this pid and start time runs.
pub fn is_alive(process: &Value) -> bool {
    let Some(pid) = process["pid"].as_i64() else { return false };
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
    let fields: Vec<&str> = rest.split(' ').collect();
    !matches!(fields[0], "Z" | "X")
        && fields.get(19).and_then(|text| text.parse().ok()) == process["start_time"].as_u64()
}

/// Whether the container's first process runs.
pub fn has_process(lease: &Value) -> bool {
    is_alive(&lease["init"]["process"])
}

pub fn init_pid(lease: &Value) -> Option<i32> {
    lease["init"]["process"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok())
}

/// Whether anything of the lease's container runs, or the process that is starting it.
pub fn has_owner(lease: &Value) -> bool {
    if lease["init"].is_null() {
        return is_alive(&lease["owner"]);
    }
    let cgroup = lease["init"]["cgroup"].as_str().unwrap_or("/nowhere");
    let events = std::fs::read_to_string(Path::new(cgroup).join("cgroup.events")).unwrap_or_default();
    // cgroup v1 has no such file.
    let procs = std::fs::read_to_string(Path::new(cgroup).join("cgroup.procs")).unwrap_or_default();
    has_process(lease) || events.contains("populated 1") || !procs.is_empty()
}
