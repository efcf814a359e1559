//! The amounts of a share on this host: which GPU, how many SMs, how much memory, what each process gets.

use std::fmt;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;

use crate::preview::{does_not_protect, protects};
use crate::shown::sharing;
use sublet_core::inventory::{Device, Inventory, Join};
use sublet_core::ledger::Lease;
use sublet_core::place::Placement;
use sublet_core::request::Request;
use sublet_core::share::{Guarding, Isolation, Mode, Percent, Priority, Suspend, show_duration};

/// The answer, for JSON and for people.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Answer {
    #[serde(flatten)]
    amounts: Amounts,
    /// `shared` or `dedicated`.
    #[schemars(with = "String")]
    isolation: Isolation,
    /// `normal` or `low`.
    #[schemars(with = "String")]
    priority: Priority,
    /// What the guard does about its processes; null: as the configuration says.
    guard: Option<String>,
    /// Whether its GPU memory may be put into host memory: `never`, `allow` or `allow-many`.
    #[schemars(with = "String")]
    suspend: Suspend,
    /// Rights on the MIG capabilities of the driver.
    mig_caps: Vec<&'static str>,
    /// How long it waits for room.
    wait_ms: u64,
    protects: Vec<&'static str>,
    does_not_protect: Vec<&'static str>,
    pub warnings: Vec<String>,
}

/// What a lease is, in numbers.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Amounts {
    gpus: Vec<Gpu>,
    /// The longest way between two of them, such as `nvlink` or `numa-node`; null: it has one, or the driver does not tell.
    #[schemars(with = "Option<String>")]
    joined: Option<Join>,
    /// `time-slice`, `mps`, `mig` or `exclusive`.
    #[schemars(with = "String")]
    mode: Mode,
    /// The key of the MPS daemon that serves it; `own` if that serves this container alone.
    mps_server: Option<String>,
    /// The limit on the SMs of all its processes together.
    sm_percent: Option<f64>,
    /// The limit on the memory of all its processes together, on each GPU.
    memory_bytes: Option<u64>,
    processes: u32,
}

/// What it gets of one device.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct Gpu {
    uuid: String,
    /// As in `sublet.gpu`: `0`, or `0:2` of a MIG device.
    number: String,
    /// The GPU's name, or the MIG device's profile.
    name: String,
    /// The SMs that the container sees; `None` if NVML does not report them.
    sm_count: Option<u64>,
    sm_total: Option<u32>,
    memory_bytes: u64,
    memory_total_bytes: u64,
    /// What one of its processes gets.
    process_sm_count: Option<u64>,
    process_memory_bytes: u64,
}

impl Gpu {
    fn of(device: &Device, lease: &Lease) -> Self {
        Self {
            uuid: device.uuid.clone(),
            number: device.number(),
            name: device.kind().to_owned(),
            sm_count: sms(lease.sm, device),
            sm_total: device.sm_count,
            memory_bytes: lease.memory_bytes.unwrap_or(device.memory_bytes),
            memory_total_bytes: device.memory_bytes,
            process_sm_count: sms(lease.sm_of_process(), device),
            process_memory_bytes: lease.memory_of_process().unwrap_or(device.memory_bytes),
        }
    }
}

/// The SMs of `device` within `limit`.
pub fn sms(limit: Option<Percent>, device: &Device) -> Option<u64> {
    limit.map_or(device.sm_count.map(u64::from), |sm| device.sms_at(sm))
}

impl Answer {
    /// That to `request`, whose share would be `lease`.
    pub fn of(request: &Request, placement: &Placement, lease: &Lease, inventory: &Inventory) -> Self {
        Self {
            amounts: Amounts::of(lease, inventory),
            isolation: placement.isolation,
            priority: placement.priority,
            guard: request.guard.map(|guard| match guard {
                Guarding::AtLeast(action) => format!("at least {action}"),
                Guarding::Exactly(action) => format!("{action}, as [share] says"),
            }),
            suspend: placement.suspend,
            mig_caps: request.mig_caps.iter().map(Into::into).collect(),
            wait_ms: u64::try_from(request.wait.as_millis()).unwrap_or(u64::MAX),
            protects: protects(placement),
            does_not_protect: does_not_protect(placement),
            warnings: Vec::new(),
        }
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = self.amounts.rows();
        rows.extend((self.priority == Priority::Low).then(|| ("Priority", "low".to_owned())));
        rows.extend(self.guard.iter().map(|guard| ("Guard", guard.clone())));
        let may = !self.suspend.is_never();
        rows.extend(may.then(|| ("Suspend", self.suspend.to_string())));
        let has_rights = !self.mig_caps.is_empty();
        rows.extend(has_rights.then(|| ("MIG rights", self.mig_caps.join(", "))));
        let wait = Some(Duration::from_millis(self.wait_ms)).filter(|wait| !wait.is_zero());
        rows.extend(wait.map(|wait| ("Wait", format!("up to {} for room", show_duration(wait)))));
        rows
    }
}

impl Amounts {
    /// The devices of `lease`. A device that is gone has none.
    pub fn of(lease: &Lease, inventory: &Inventory) -> Self {
        let devices = lease.devices.iter().filter_map(|uuid| inventory.device(uuid));
        let server = |key: String| if key == lease.id.as_str() { "own".to_owned() } else { key };
        Self {
            gpus: devices.clone().map(|device| Gpu::of(device, lease)).collect(),
            joined: inventory.widest_join(
                &devices.filter(|device| !device.is_mig()).map(|gpu| gpu.index).collect::<Vec<_>>(),
            ),
            mode: lease.mode,
            mps_server: lease.daemon.as_ref().map(|key| server(key.to_string())),
            sm_percent: lease.sm.map(Percent::as_f64),
            memory_bytes: lease.memory_bytes,
            processes: lease.processes,
        }
    }

    /// Each with its name.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let gpu = |gpu: &Gpu| ("GPU", format!("{}, {}, {}", gpu.number, gpu.name, gpu.uuid));
        let mut rows: Vec<_> = self.gpus.iter().map(gpu).collect();
        rows.extend(self.joined.map(|join| ("Joined", join.words().to_owned())));
        rows.extend([
            ("Mode", self.mode()),
            ("SMs", self.of_each(|gpu| self.sms(gpu))),
            ("Memory", self.of_each(|gpu| self.memory(gpu))),
            ("Processes", self.of_each(|gpu| self.process(gpu))),
        ]);
        rows
    }

    /// One text for all GPUs if it is the same for each, else one for each.
    fn of_each(&self, of: impl Fn(&Gpu) -> String) -> String {
        let texts: Vec<String> = self.gpus.iter().map(of).collect();
        match &texts[..] {
            [] => String::new(),
            [one] => one.clone(),
            [first, rest @ ..] if rest.iter().all(|text| text == first) => format!("{first}, on each"),
            _ => {
                let each = self.gpus.iter().zip(&texts);
                each.map(|(gpu, text)| format!("{text} on {}", gpu.number)).collect::<Vec<_>>().join("; ")
            }
        }
    }

    fn mode(&self) -> String {
        let own_server = self.mps_server.as_deref() == Some("own");
        let of_several = if own_server && self.gpus.len() > 1 { " for all of them" } else { "" };
        sharing(self.mode, self.gpus.first().map(|gpu| gpu.name.as_str()), own_server) + of_several
    }

    fn sms(&self, gpu: &Gpu) -> String {
        let Some((count, total)) = gpu.sm_count.zip(gpu.sm_total) else {
            let limit = self.sm_percent.map_or_else(|| "all".to_owned(), |sm| format!("at most {sm} %"));
            return format!("{limit} (NVML does not tell how many there are)");
        };
        match (self.sm_percent, self.mode) {
            (Some(sm), _) => format!("{count} of {total} (at most {sm} %)"),
            (None, Mode::Mps) => format!("{count} of {total} (no limit)"),
            (None, Mode::TimeSlice) => format!("{count} of {total}, in turns"),
            (None, Mode::Exclusive) => format!("{count} of {total}, its own"),
            (None, Mode::Mig) => format!("{count}, the MIG device's own"),
        }
    }

    fn memory(&self, gpu: &Gpu) -> String {
        let (own, total) = (gpu.memory_bytes >> 20, gpu.memory_total_bytes >> 20);
        match (self.memory_bytes, self.mode) {
            (Some(_), Mode::Mig) => format!("{total} MiB, which its GPU instance's other devices use too"),
            (Some(_), _) => format!("{own} MiB of {total} MiB"),
            (None, Mode::Exclusive | Mode::Mig) => format!("{total} MiB, its own"),
            (None, _) => format!("{total} MiB (no limit)"),
        }
    }

    fn process(&self, gpu: &Gpu) -> String {
        let sms = self.sm_percent.and(gpu.process_sm_count).map(|count| format!("{count} SMs"));
        let memory = self.memory_bytes.map(|_| format!("{} MiB", gpu.process_memory_bytes >> 20));
        let each: Vec<String> = [sms, memory].into_iter().flatten().collect();
        let together = gpu.process_sm_count.map(|count| count * u64::from(self.processes));
        let fewest = together.filter(|together| self.sm_percent.is_some() && gpu.sm_count < Some(*together));
        let fewest = fewest.map(|together| {
            format!(" (the driver gives no process fewer SMs, so together they may have {together})")
        });
        match (self.processes, &each[..]) {
            (count, []) => count.to_string(),
            (1, each) => format!("1, with {}", each.join(" and ")),
            (count, each) => {
                format!("{count}, each with {}{}", each.join(" and "), fewest.unwrap_or_default())
            }
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in self.rows() {
            writeln!(f, "{name:<10} {value}")?;
        }
        write!(f, "\nThis share protects")?;
        self.protects.iter().try_for_each(|line| write!(f, "\n  + {line}"))?;
        write!(f, "\nIt does not protect")?;
        self.does_not_protect.iter().try_for_each(|line| write!(f, "\n  - {line}"))?;
        self.warnings.iter().try_for_each(|line| write!(f, "\nWarning: {line}"))
    }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
