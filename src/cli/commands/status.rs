//! `sublet status`: who has which GPU and how much of it; `--last-error`: why the last container was refused.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::tables::{self, Cell, Column, Format};
use crate::mps_daemons::{self, Listed};
use crate::names::{Name, Names, WHY_WITHOUT_SHARE, lease_of};
use crate::setup::docker::without_share;
use crate::shown::{Device, Words, bar, cut, fraction, or_dash, utf8, word};
use crate::status::{LeaseOnDevice, Room, Sources, Status};
use crate::usage;
use sublet_core::admit::{self, RefusalRecord, confirmed_inventory, is_remote};
use sublet_core::broker::policy_limits::Left;
use sublet_core::config::{Config, PolicyRule};
use sublet_core::inventory::{self, Inventory};
use sublet_core::ledger::{Lease, Ledger, Store};
use sublet_core::text::{LONGEST_NAME, safe, short_id};

/// How many of the latest events of the guard are shown.
const SHOWN: usize = 5;

/// Clears a terminal: the cursor to the top left, everything below it gone (ECMA-48, CUP and ED).
const CLEAR: &str = "\u{1b}[H\u{1b}[2J";

/// The length of a bar, in characters.
const BAR: usize = 10;

/// The columns of devices. Those with the highest number go first where a terminal is too narrow for all of them.
const DEVICE_COLUMNS: [Column; 11] = [
    Column("GPU", 0),
    Column("NAME", 3),
    Column("MODE", 1),
    Column("MEMORY", 4),
    Column("USED", 0),
    Column("BOOKED", 1),
    Column("OF", 2),
    Column("SM", 5),
    Column("BUSY", 1),
    Column("BOOKED", 2),
    Column("LEASES", 6),
];

/// Arguments of `sublet status`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Only this device: an index, a UUID or its beginning, a PCI bus id, `G:M`, an alias
    #[arg(long, value_name = "DEVICE")]
    gpu: Option<String>,
    /// Only this container: its name or id, its lease's id, or the beginning of one that no other has
    #[arg(long)]
    container: Option<String>,
    /// Show it again every so many seconds, until Ctrl-C; without a number every 2
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2",
        value_parser = clap::value_parser!(u64).range(1..=3600),
        conflicts_with = "last_error"
    )]
    watch: Option<u64>,
    /// Show why the last container was refused
    #[arg(long)]
    last_error: bool,
}

/// Runs it.
///
/// # Errors
/// There is no driver, or no ledger; a device or a container that is asked for does not exist.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    if arguments.last_error {
        return last_error(arguments.format, config);
    }
    let Some(seconds) = arguments.watch else {
        print!("{}", shown(arguments, config)?);
        return Ok(());
    };
    let clear = if std::io::stdout().is_terminal() { CLEAR } else { "" };
    loop {
        // Written at once, so that a terminal does not flicker.
        let text =
            shown(arguments, config).unwrap_or_else(|error| format!("sublet: {}\n", tables::chain(&error)));
        print!("{clear}{text}");
        if !super::closed_output::is_open() {
            return Ok(());
        }
        sleep(Duration::from_secs(seconds));
    }
}

/// The state of this host, and what it was read from.
pub(super) struct Host {
    pub status: Status,
    pub ledger: Ledger,
    pub inventory: Inventory,
    pub names: Names,
}

impl Host {
    pub fn read(config: &Config) -> anyhow::Result<Self> {
        let ledger = super::settled_ledger(config)?;
        let inventory = confirmed_inventory(config)?;
        let names = Names::learn(&ledger, config);
        let store = Store::open(&config.state_dir)?;
        let usage = usage::of_host(&ledger, &inventory, config);
        let mps = mps_daemons::list(&store, config)?;
        let sources =
            Sources { inventory: &inventory, ledger: &ledger, names: &names, usage: &usage, config };
        let mut status = Status::of(&sources, mps);
        let without = without_share(Path::new("/"), &ledger, config);
        status.warnings.extend(without.iter().map(|name| format!("container {name}: {WHY_WITHOUT_SHARE}")));
        Ok(Self { status, ledger, inventory, names })
    }
}

/// What is printed once.
fn shown(arguments: &Arguments, config: &Config) -> anyhow::Result<String> {
    let Host { mut status, ledger, inventory, names } = Host::read(config)?;
    let lease = arguments.container.as_deref().map(|text| lease_of(text, &ledger, &names)).transpose()?;
    let devices = arguments.gpu.as_deref().map(|text| named(text, &inventory, config)).transpose()?;
    status.only(
        &|uuid| devices.as_ref().is_none_or(|devices| devices.iter().any(|device| device == uuid)),
        lease.map(|lease| lease.id.as_str()),
    );
    let own = is_remote(config).then(|| Own::ask(config));
    match arguments.format {
        Format::Json => {
            let mut document = serde_json::to_value(&status)?;
            if let Some(own) = own {
                document["own"] = json!(own);
            }
            Ok(serde_json::to_string_pretty(&document)? + "\n")
        }
        Format::Table => Ok(tables_of(&status, own.as_ref())),
    }
}

/// UUIDs of the devices that `text` names, with the MIG devices of a GPU.
fn named(text: &str, inventory: &Inventory, config: &Config) -> anyhow::Result<Vec<String>> {
    let all = inventory.with_left_out();
    let found = super::devices(text, &all, config)?;
    let is_in = |device: &&inventory::Device| {
        found.iter().any(|named| named.uuid == device.uuid || named.uuid == device.gpu())
    };
    let of_left_out = inventory.left_out.iter().flat_map(|gone| &gone.mig);
    Ok(all.devices.iter().chain(of_left_out).filter(is_in).map(|device| device.uuid.clone()).collect())
}

/// What `--last-error` prints as JSON; null: no container has been refused.
#[derive(Serialize, JsonSchema)]
pub struct LastRefusal {
    /// RFC 3339.
    time: String,
    /// The container's id; if it is unknown, its bundle or root filesystem.
    container_id: String,
    /// One line.
    reason: String,
    /// The uid of the container's engine.
    uid: u32,
    /// Whether it was started: the reason is then a warning about its image.
    started: bool,
}

/// For root of all containers, for a user of their own.
fn last_error(format: Format, config: &Config) -> anyhow::Result<()> {
    let (us, is_remote) = (nix::unistd::geteuid().as_raw(), is_remote(config));
    let last = admit::refusals(config).into_iter().rfind(|record| !is_remote || record.uid == us);
    let last = last.map(|RefusalRecord { time, container_id, reason, uid, started }| LastRefusal {
        time: tables::timestamp(time),
        container_id,
        reason,
        uid,
        started,
    });
    tables::print(format, &last, || match &last {
        None if is_remote => "No container of yours has been refused.".to_owned(),
        None => "No container has been refused since boot.".to_owned(),
        Some(LastRefusal { time, container_id, reason, started, .. }) => {
            let started = if *started { ", which was started" } else { "" };
            format!("{time}  container {container_id}{started}: {reason}")
        }
    })
}

/// Warnings first, then the devices, the leases, the daemons, and what the guard did last.
fn tables_of(status: &Status, own: Option<&Own>) -> String {
    let mut text: String = status.warnings.iter().flat_map(|warning| [warning.as_str(), "\n"]).collect();
    if !text.is_empty() {
        text.push('\n');
    }
    let simulated = if status.driver.simulated { "  SIMULATED" } else { "" };
    let _ = writeln!(text, "Driver {}{simulated}\n", status.driver.version);
    let utf8 = utf8();
    let devices: Vec<_> = Device::all(&status.devices).map(|device| device_row(&device, utf8)).collect();
    let devices = tables::fitting(&DEVICE_COLUMNS, &devices, tables::terminal_width());
    let _ = writeln!(text, "{devices}\n\n{}", lease_table(status));
    if !status.mps.is_empty() {
        let label = |uuid: &str| status.number(uuid).into_owned();
        let _ = writeln!(text, "\n{}", daemon_table(&status.mps, label));
    }
    if status.guard.watching {
        text.push_str("\nGuard: on.\n");
    } else if !status.guard.events.is_empty() {
        text.push('\n');
    }
    for event in &status.guard.events[status.guard.events.len().saturating_sub(SHOWN)..] {
        let _ = writeln!(text, "{}  {}", event.time, event.text);
    }
    if let Some(own) = own {
        let _ = writeln!(text, "\n{}", own.words());
    }
    text
}

/// A GPU or MIG device, with what is used and booked.
fn device_row(device: &Device<'_>, utf8: bool) -> Vec<String> {
    let host = if device.part.is_none() && device.gpu.memory_of_host { ", host memory" } else { "" };
    // What keeps it from being served.
    let obstacle = match device.part {
        None => Some(device.gpu.health.state).filter(|state| *state != "ok").map(str::to_uppercase),
        Some(part) => part.fault.as_ref().map(|_| "unusable".to_owned()),
    };
    let busy = device.used.and_then(|used| used.busy_percent);
    let used = or_dash(device.used.and_then(|used| used.memory_bytes).map(tables::memory));
    let dash = || "-".to_owned();
    let of = tables::memory(device.memory_bytes);
    let [memory_bar, used, booked_memory, of] = match (device.memory_with(), device.own_bookings()) {
        (Some(first), _) => [String::new(), format!("as {first}"), String::new(), String::new()],
        (None, None) => [String::new(), used, dash(), of],
        (None, Some(booked)) => {
            let part = fraction(booked.memory_bytes, device.memory_bytes);
            let memory_bar = bar(device.memory_used(), Some(part), BAR, utf8);
            [memory_bar, used, tables::memory(booked.memory_bytes), of]
        }
    };
    let [sm_bar, booked_sm, leases] = match device.own_bookings() {
        None => [String::new(), dash(), dash()],
        Some(Room { sm_percent, .. }) => {
            let sm_bar = bar(busy.map(|busy| f64::from(busy) / 100.0), Some(sm_percent / 100.0), BAR, utf8);
            [sm_bar, format!("{sm_percent} %"), device.lease_count.to_string()]
        }
    };
    vec![
        format!("{}{}", device.branch(utf8), device.number),
        format!("{}{host}", device.name),
        device.state(obstacle.as_deref()),
        memory_bar,
        used,
        booked_memory,
        of,
        sm_bar,
        or_dash(busy.map(|busy| format!("{busy} %"))),
        booked_sm,
        leases,
    ]
}

/// The table of leases and the containers that hold them; a line where there is no lease.
pub(super) fn lease_table(status: &Status) -> String {
    if status.leases.is_empty() {
        return "No leases.".to_owned();
    }
    tables::fitting_rows(status.leases.iter().map(|lease| lease_row(lease, status)).collect())
}

/// Those with the highest number go first where a terminal is too narrow for all of them.
fn lease_row(lease: &LeaseOnDevice, status: &Status) -> [Cell; 13] {
    let words = Words::of(lease, status, LONGEST_NAME);
    [
        ("CONTAINER", 0, words.name),
        ("IMAGE", 8, words.image),
        ("USER", 6, lease.user.clone()),
        ("GPU", 0, words.gpu),
        ("MODE", 1, words.mode),
        ("SM", 0, words.sm),
        ("BUSY", 2, words.busy),
        ("MEMORY", 0, words.memory),
        ("PROCESSES", 7, words.processes),
        ("STATE", 3, words.state),
        ("PID", 9, or_dash(lease.pid)),
        ("AGE", 5, tables::ago(lease.taken)),
        ("LEASE", 4, lease.id.clone()),
    ]
}

/// What people call the container of a lease in the ledger, as the table does.
pub(super) fn label(lease: &Lease, name: Option<&Name>) -> String {
    let called = name
        .and_then(|name| [&name.name, &name.part_of, &name.unit].into_iter().find(|text| !text.is_empty()));
    called.map_or_else(|| short_id(&lease.container.name()), |called| cut(called))
}

/// The table of MPS daemons; `label` names the device with a UUID.
pub(super) fn daemon_table(daemons: &[Listed], label: impl Fn(&str) -> String) -> String {
    // With the time that the daemon still waits for a lease.
    let idle = |daemon: &Listed| match (daemon.idle_seconds, daemon.ends_in_seconds) {
        (None, _) => String::new(),
        (Some(idle), None) => format!(", idle for {idle} s"),
        (Some(_), Some(left)) => format!(", idle, ends in {left} s"),
    };
    // Those with the highest number go first where a terminal is too narrow for all of them.
    let row = |daemon: &Listed| {
        let devices: Vec<String> = daemon.devices.iter().map(|uuid| label(uuid)).collect();
        [
            ("MPS DAEMON", 0, daemon.key.to_string()),
            ("GPU", 0, devices.join(", ")),
            ("STATE", 0, word(&daemon.state) + &idle(daemon)),
            ("PID", 2, or_dash(daemon.pid)),
            ("SM CEILING", 3, format!("{} %", daemon.ceiling_percent)),
            ("MEMORY CEILING", 3, tables::memory_limit(daemon.ceiling_memory_bytes)),
            ("CLIENTS", 1, or_dash(daemon.clients)),
        ]
    };
    tables::fitting_rows(daemons.iter().map(row).collect())
}

// What a user without root sees below the tables: their own policy limits, and what is left of them.

/// The member `own` of `sublet status --format json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Own {
    /// The job of Slurm's in which the user asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<u64>,
    /// The policy rule that names the user; `None` if there is none, see `refused`.
    policy: Option<PolicyRule>,
    /// What the user may still take under that rule.
    left: Option<Left>,
    /// The reason why the user can take nothing, in one line.
    refused: Option<String>,
}

impl Own {
    /// Asks `sublet serve`.
    pub fn ask(config: &Config) -> Self {
        let refused = |reason: String| Self { refused: Some(reason), ..Self::default() };
        match admit::own_status(config).map(serde_json::from_value) {
            Ok(Ok(own)) => own,
            Ok(Err(error)) => refused(format!("sublet serve: {}", safe(&error.to_string()))),
            Err(error) => refused(error.to_string()),
        }
    }

    fn words(&self) -> String {
        if let Some(reason) = &self.refused {
            return format!("You cannot take a share: {reason}");
        }
        if let Some(job) = self.job {
            return format!("In job {job}, programs and containers have what the job got from Slurm.");
        }
        let (Some(rule), Some(left)) = (&self.policy, &self.left) else {
            return "You have no policy limits.".to_owned();
        };
        match &caps(rule, left)[..] {
            [] => "Your policy sets no limits.".to_owned(),
            caps => format!("Your policy: {}", caps.join("; ")),
        }
    }
}

fn caps(rule: &PolicyRule, left: &Left) -> Vec<String> {
    let words = |words: Vec<&str>| safe(&words.join(", "));
    let modes = rule.modes.as_ref().map(|modes| modes.iter().map(Into::into).collect());
    let devices = rule.devices.as_ref().map(|devices| devices.iter().map(|device| &**device).collect());
    [
        modes.map(|modes| format!("modes {}", words(modes))),
        rule.sm.zip(left.sm_percent).map(|(cap, left)| format!("sm {cap} %, {left} % left")),
        rule.memory
            .zip(left.memory_bytes)
            .map(|(cap, left)| format!("memory {}, {} left", tables::memory(cap), tables::memory(left))),
        devices.map(|devices| format!("devices {}", words(devices))),
        rule.leases.zip(left.leases).map(|(cap, left)| format!("leases {cap}, {left} left")),
    ]
    .into_iter()
    .flatten()
    .collect()
}
