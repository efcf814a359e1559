//! `sublet status`: who has which GPU and how much of it; `--last-error`: why the last container was refused.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::doctor::ask_engines;
use super::tables::{self, Cell, Format};
use crate::mps_daemons::{self, Listed};
use crate::names::{Name, Names, Of, WHY_WITHOUT_SHARE, is_another, is_id, lease_of, of_user, user};
use crate::shown::{Device, Words, bar, cut, escaped, fraction, number_of, or_dash, word};
use crate::status::{LeaseOnDevice, Room, Sources, Status, Waiting};
use crate::terminal::utf8;
use crate::usage;
use sublet_core::admit::{self, RefusalRecord, confirmed_inventory, is_remote};
use sublet_core::broker::policy_limits::Left;
use sublet_core::broker::protocol::Ask;
use sublet_core::config::{Config, PolicyRule};
use sublet_core::inventory::{self, Inventory};
use sublet_core::ledger::{Lease, Ledger, Store};
use sublet_core::text::{LONGEST_NAME, first_line, in_lines, safe, short_id};

/// How many of the latest events of the guard are shown.
const SHOWN: usize = 5;

/// Clears a terminal: the cursor to the top left, everything below it gone (ECMA-48, CUP and ED).
const CLEAR: &str = "\u{1b}[H\u{1b}[2J";

/// The length of a bar, in characters.
const BAR: usize = 10;

/// Arguments of `sublet status`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Only this device: an index, a UUID or its beginning, a PCI bus id, G:M (MIG device M of GPU G), an alias
    #[arg(long, value_name = "DEVICE")]
    gpu: Option<String>,
    /// Only this container: its name or id, its lease's id, or the beginning of one that no other has
    #[arg(long)]
    container: Option<String>,
    #[command(flatten)]
    of: Of,
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
    /// With --last-error: also each device that could have served it, and why it did not
    #[arg(long, requires = "last_error")]
    verbose: bool,
}

/// Runs it.
///
/// # Errors
/// There is no driver, or no ledger; a device or a container that is asked for does not exist.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    if arguments.last_error {
        return last_error(arguments, config);
    }
    let Some(seconds) = arguments.watch else {
        print!("{}", shown(arguments, config)?);
        return Ok(());
    };
    let clear = if std::io::stdout().is_terminal() { CLEAR } else { "" };
    loop {
        // Written at once, so that a terminal does not flicker.
        let failed = |error| {
            tables::wrapped(&format!("sublet: {}\n", tables::chain(&error)), tables::terminal_width())
        };
        print!("{clear}{}", shown(arguments, config).unwrap_or_else(failed));
        if !super::closed_output::is_open() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs(seconds));
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
        let usage = usage::of_host(&ledger, &inventory, usage::SAMPLED, config);
        let mps = mps_daemons::list(&store, config)?;
        let sources =
            Sources { inventory: &inventory, ledger: &ledger, names: &names, usage: &usage, config };
        let mut status = Status::of(&sources, mps);
        let without = crate::setup::docker::without_share(Path::new("/"), &ledger, config);
        status.warnings.extend(without.iter().map(|name| format!("container {name}: {WHY_WITHOUT_SHARE}")));
        Ok(Self { status, ledger, inventory, names })
    }
}

/// The text of one output.
fn shown(arguments: &Arguments, config: &Config) -> anyhow::Result<String> {
    let Host { mut status, ledger, inventory, names } = Host::read(config)?;
    let lease = arguments.container.as_deref().map(|text| lease_of(text, &ledger, &names)).transpose()?;
    let devices = arguments.gpu.as_deref().map(|text| named(text, &inventory, config)).transpose()?;
    let of = &arguments.of;
    let is_wanted = |held: &LeaseOnDevice| {
        lease.is_none_or(|lease| held.id == lease.id.as_str()) && of.has(&held.user, held.owner.as_ref())
    };
    status.only(
        &|uuid| devices.as_ref().is_none_or(|devices| devices.iter().any(|device| device == uuid)),
        if lease.is_some() || of.is_any() { Some(&is_wanted) } else { None },
    );
    let is_of = |waiting: &Waiting| of.has(&user(waiting.uid), waiting.owner.as_ref());
    status.waiting.retain(|waiting| lease.is_none() && is_of(waiting));
    let own = is_remote(config).then(|| Own::ask(config));
    match arguments.format {
        Format::Json => {
            let mut document = serde_json::to_value(&status)?;
            if let Some(own) = own {
                document["own"] = serde_json::json!(own);
            }
            Ok(serde_json::to_string_pretty(&document)? + "\n")
        }
        Format::Table => Ok(tables_of(&status, own.as_ref(), tables::terminal_width(), utf8())),
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
#[derive(Serialize, schemars::JsonSchema)]
pub struct LastRefusal {
    /// RFC 3339.
    time: String,
    /// The container's id; if it is unknown, its bundle or root filesystem.
    container_id: String,
    /// What its engine calls it, where that is known.
    name: Option<String>,
    /// One line.
    reason: String,
    /// The uid of the container's engine.
    uid: u32,
    /// Whether it was started: the reason is then a warning about its image or its runtime.
    started: bool,
    /// Each device that could have served it, and why it did not.
    candidates: Vec<String>,
}

/// For root of all containers, for a user of their own.
fn last_error(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    let (us, is_remote) = (nix::unistd::geteuid().as_raw(), is_remote(config));
    let last = admit::refusals(config).into_iter().rfind(|record| !is_remote || record.uid == us);
    let names = Names::now(None, config);
    let called = |id: &str| {
        // Names of users' containers are not kept.
        let asked = || is_id(id).then(|| ask_engines("{{.Name}}", id)).flatten();
        names.of_id(id).and_then(Name::called).map(str::to_owned).or_else(asked).map(|name| cut(&name))
    };
    let last =
        last.map(|RefusalRecord { time, container_id, reason, uid, started, candidates }| LastRefusal {
            time: tables::timestamp(time),
            name: if is_another(uid) { None } else { called(&container_id) },
            container_id,
            reason: names.replace_ids_of(uid, &reason),
            uid,
            started,
            candidates: candidates.iter().map(|text| names.replace_ids_of(uid, text)).collect(),
        });
    tables::print(arguments.format, &last, || match &last {
        None if is_remote => "No container of yours has been refused.".to_owned(),
        None => "No container has been refused since boot.".to_owned(),
        Some(last) => last.words(arguments.verbose),
    })
}

impl LastRefusal {
    fn words(&self, verbose: bool) -> String {
        let Self { time, container_id, name, reason, uid, started, candidates } = self;
        // With an engine's whole id it would be wider than a terminal.
        let id = if container_id.starts_with('/') { container_id.clone() } else { short_id(container_id) };
        let called = name.as_ref().unwrap_or(&id);
        let started = if *started { ", which was started" } else { "" };
        // A line that begins with `why:` or `fix:` would look like one of sublet's own.
        let of = is_another(*uid).then(|| format!(", {}", of_user(*uid)));
        let reason = if of.is_some() { reason.clone() } else { in_lines(reason) };
        let each: String = candidates.iter().filter(|_| verbose).flat_map(|text| ["\n  - ", text]).collect();
        format!("{time}  container {called}{}{started}: {reason}{each}", of.unwrap_or_default())
    }
}

/// Warnings first, then the devices, the leases, who waits, the daemons, and what the guard did last.
fn tables_of(status: &Status, own: Option<&Own>, width: Option<usize>, utf8: bool) -> String {
    let mut text: String = status.warnings.iter().flat_map(|warning| [warning.as_str(), "\n"]).collect();
    if !text.is_empty() {
        text.push('\n');
    }
    let simulated = if status.driver.simulated { "  SIMULATED" } else { "" };
    let _ = writeln!(text, "Driver {}{simulated}\n", status.driver.version);
    let devices = Device::all(&status.devices).map(|device| device_row(&device, utf8)).collect();
    let devices = tables::fitting_rows(devices, width);
    let _ = writeln!(text, "{devices}\n\n{}", lease_table(status, width));
    for device in Device::all(&status.devices) {
        let drained = device.drain().map(|words| format!("\nGPU {} is drained {words}\n", device.number));
        text.extend(drained);
    }
    if !status.waiting.is_empty() {
        text.push_str("\nWaiting for a share:\n");
        text.extend(status.waiting.iter().map(waiting_line));
    }
    if !status.mps.is_empty() {
        let label = |uuid: &str| number_of(uuid, status);
        let _ = writeln!(text, "\n{}", daemon_table(&status.mps, label, width));
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
    tables::wrapped(&text, width)
}

/// A GPU or MIG device, with its use and bookings. Cells with the highest number go first where a terminal is too
/// narrow for all of them.
fn device_row(device: &Device<'_>, utf8: bool) -> [Cell; 11] {
    let host = if device.part.is_none() && device.gpu.memory_of_host { ", host memory" } else { "" };
    let busy = device.used.and_then(|used| used.busy_percent);
    let used = or_dash(device.used.and_then(|used| used.memory_bytes).map(tables::memory));
    let dash = || "-".to_owned();
    let reserved = device.part.map_or(device.gpu.reserved, |part| part.reserved);
    let of = tables::memory(device.memory_bytes);
    let [memory_bar, used, booked_memory, of] = match (device.memory_with(), device.own_bookings()) {
        (Some(first), _) => [String::new(), format!("as {first}"), String::new(), String::new()],
        (None, None) => [String::new(), used, String::new(), of],
        (None, Some(booked)) => {
            let part = fraction(booked.memory_bytes, device.memory_bytes);
            let memory_bar = bar(device.memory_used(), Some(part), BAR, utf8);
            [memory_bar, used, format!(", {}", tables::memory(booked.memory_bytes)), of]
        }
    };
    let [sm_bar, booked, leases] = match device.own_bookings() {
        None => [String::new(), dash(), dash()],
        Some(Room { sm_percent, .. }) => {
            let sm_bar = bar(busy.map(|busy| f64::from(busy) / 100.0), Some(sm_percent / 100.0), BAR, utf8);
            [sm_bar, format!("{sm_percent} % SM{booked_memory}"), device.lease_count.to_string()]
        }
    };
    [
        ("GPU", 0, format!("{}{}", device.branch(utf8), device.number)),
        ("NAME", 4, format!("{}{host}", device.name)),
        ("MODE", 1, device.state()),
        ("FOR", 2, reserved.map(|mode| mode.to_string()).unwrap_or_default()),
        ("MEMORY", 5, memory_bar),
        ("USED", 0, used),
        ("OF", 3, of),
        ("SM", 6, sm_bar),
        ("BUSY", 1, or_dash(busy.map(|busy| format!("{busy} %")))),
        ("BOOKED", 1, booked),
        ("LEASES", 7, leases),
    ]
}

/// As `2. web has waited for 3m 20s, and is started when there is room: no room for mps, …`.
fn waiting_line(waiting: &Waiting) -> String {
    let Waiting { container_id, name, pid, uid, place, asks, why, began, .. } = waiting;
    let id = container_id.as_deref().map(short_id);
    let by = if *uid == 0 { String::new() } else { format!(" {}", of_user(*uid)) };
    let who = name.as_deref().map(safe).or(id).unwrap_or_else(|| format!("`sublet wait`{by}"));
    let again = if pid.is_none() { ", and is started when there is room" } else { "" };
    let why = first_line(why);
    let what = asks.as_deref().filter(|asks| !why.contains(asks));
    let what = what.map(|asks| format!(" for {asks}")).unwrap_or_default();
    format!("{place}. {who} has waited for {}{what}{again}: {}\n", tables::ago(*began), escaped(why))
}

/// The table of leases and the containers that hold them; a line where there is no lease.
pub(super) fn lease_table(status: &Status, width: Option<usize>) -> String {
    if status.leases.is_empty() {
        return "No leases.".to_owned();
    }
    tables::fitting_rows(status.leases.iter().map(|lease| lease_row(lease, status)).collect(), width)
}

/// Columns with the highest number go first where a terminal is too narrow for all of them.
fn lease_row(lease: &LeaseOnDevice, status: &Status) -> [Cell; 14] {
    let words = Words::of(lease, status, LONGEST_NAME);
    [
        ("CONTAINER", 0, words.name),
        ("IMAGE", 9, words.image),
        ("USER", 7, words.user),
        ("OWNER", 3, words.owner),
        ("GPU", 0, words.gpu),
        ("MODE", 1, words.mode),
        ("SM", 0, words.sm),
        ("BUSY", 2, words.busy),
        ("MEMORY", 0, words.memory),
        ("PROCESSES", 8, words.processes),
        ("STATE", 4, words.state),
        ("PID", 10, or_dash(lease.pid)),
        ("AGE", 6, tables::ago(lease.taken)),
        ("LEASE", 5, lease.id.clone()),
    ]
}

/// The name of the container of a lease in the ledger, as in the table.
pub(super) fn label(lease: &Lease, name: Option<&Name>) -> String {
    name.and_then(Name::called).map_or_else(|| short_id(&lease.container.name()), cut)
}

/// The table of MPS daemons; `label` names the device with a UUID.
pub(super) fn daemon_table(
    daemons: &[Listed],
    label: impl Fn(&str) -> String,
    width: Option<usize>,
) -> String {
    // With the time that the daemon still waits for a lease.
    let idle = |daemon: &Listed| match (daemon.idle_seconds, daemon.ends_in_seconds) {
        (None, _) => String::new(),
        (Some(idle), None) => format!(", idle for {idle} s"),
        (Some(_), Some(left)) => format!(", idle, ends in {left} s"),
    };
    // Columns with the highest number go first where a terminal is too narrow for all of them.
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
    tables::fitting_rows(daemons.iter().map(row).collect(), width)
}

// Below the tables for a user without root: their own policy limits, and the rest of them.

/// The member `own` of `sublet status --format json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Own {
    /// The job of Slurm's in which the user asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<u64>,
    /// The policy rule that names the user; `None` if there is none, see `refused`.
    policy: Option<PolicyRule>,
    /// The amounts that the user may still take under that rule.
    left: Option<Left>,
    /// The reason why the user can take nothing, in one line.
    refused: Option<String>,
}

impl Own {
    /// Asks `sublet serve`.
    pub fn ask(config: &Config) -> Self {
        let refused = |reason: String| Self { refused: Some(reason), ..Self::default() };
        match admit::own_status(&Ask::Status, config).map(serde_json::from_value) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{KnownBy, Owner};
    use crate::status::Health;
    use crate::top::fixture::{lease, look};
    use sublet_core::config::Use;
    use sublet_core::process::epoch_seconds;
    use sublet_core::share::Mode;

    /// Two GPUs, the second lost and drained; a container with its own MPS server, and one of a GPU that is gone.
    fn status() -> Status {
        let mut status = look().status;
        let [first, second] = &mut status.devices[..] else { panic!() };
        (first.mode, first.reserved) = ("time-slice", Some(Use::TimeSlice));
        second.health = Health { state: "lost", reason: None };
        second.drained = true;
        let own = LeaseOnDevice { mode: Mode::TimeSlice, own_server: true, ..lease(1, "training", Some(7)) };
        let gone = "GPU-5b1e7000-0000-4000-8000-000000000100".to_owned();
        status.leases = vec![own, LeaseOnDevice { device: gone, ..lease(2, "web", None) }];
        status.warnings =
            vec![format!("GPU 1 is left out: {}", "it fell off the bus; ".repeat(9).trim_end())];
        let waiting = |name: Option<&str>, pid| Waiting {
            container_id: name.map(|_| "0a".repeat(32)),
            name: name.map(str::to_owned),
            pid,
            uid: 0,
            owner: None,
            place: 1,
            asks: None,
            since: String::new(),
            why: "no room for mps, 40 % SM\u{1b}[2J: GPU 0 is full; why: web has it".to_owned(),
            began: epoch_seconds(),
        };
        let asks = |asks: &str, waiting| Waiting { asks: Some(asks.to_owned()), ..waiting };
        status.waiting = vec![
            asks("mps, 40 % SM", waiting(Some("web"), None)),
            asks("mps, 8 GiB", waiting(None, Some(7))),
        ];
        status
    }

    #[test]
    fn everything_fits_a_terminal_of_80() {
        let text = tables_of(&status(), None, Some(80), false);
        assert_eq!(text.lines().filter(|line| line.chars().count() > 80).collect::<Vec<_>>(), [""; 0]);
        let expected = [
            "GPU  MODE           FOR         USED    OF       BUSY  BOOKED",
            "0    time-slice     time-slice  35 GiB  140 GiB  77 %  50 % SM, 70 GiB",
            "1    LOST, drained              -       140 GiB  -     50 % SM, 70 GiB",
            "",
            "CONTAINER  GPU   MODE                 SM      BUSY         MEMORY         STATE",
            "training   0     time-slice, own MPS  12.5 %  n/a of 77 %  7 GiB / 8 GiB  active",
            "web        gone  mps                  12.5 %  -            - / 8 GiB      active",
        ];
        assert!(text.contains(&expected.join("\n")), "{text}");
        assert!(text.contains("\n\nWaiting for a share:\n1. web has waited for "), "{text}");
        let text = text.replace('\n', " ");
        let said = "no room for mps, 40 % SM\\u{1b}[2J: GPU 0 is full ";
        assert!(text.contains(&format!("0s, and is started when there is room: {said}")), "{text}");
        assert!(text.contains(&format!("`sublet wait` has waited for 0s for mps, 8 GiB: {said}")), "{text}");
    }

    #[test]
    fn owners_are_shown_at_80_columns_and_say_how_they_are_known() {
        let mut status = status();
        let owner = |name: &str, known_by| Some(Owner { name: name.to_owned(), known_by });
        let claimed = LeaseOnDevice { owner: owner("a\u{1b}[2J", KnownBy::Claim), ..lease(1, "web", None) };
        let users = LeaseOnDevice { owner: owner("ana", KnownBy::User), ..lease(2, "training", None) };
        status.leases = vec![claimed, users];
        let expected = [
            "CONTAINER  OWNER               GPU  MODE  SM      BUSY  MEMORY     STATE",
            "web        a\\u{1b}[2J (claim)  0    mps   12.5 %  -     - / 8 GiB  active",
            "training   ana                 0    mps   12.5 %  -     - / 8 GiB  active",
        ];
        let table = lease_table(&status, Some(80));
        assert_eq!(table.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn candidates_of_a_refusal_are_shown_to_who_asks() {
        let last = LastRefusal {
            time: "2026-11-27T18:00:00Z".to_owned(),
            container_id: "0123456789abcdef".repeat(4),
            name: None,
            reason: "no room; why: GPU 0 is full; fix: wait".to_owned(),
            uid: 0,
            started: false,
            candidates: vec!["GPU 0 is full".to_owned(), "GPU 1 is drained".to_owned()],
        };
        let brief = "2026-11-27T18:00:00Z  container 0123456789ab: no room\nwhy: GPU 0 is full\nfix: wait";
        assert_eq!(last.words(false), brief);
        assert_eq!(last.words(true), format!("{brief}\n  - GPU 0 is full\n  - GPU 1 is drained"));
        let users =
            "container 0123456789ab, of user 54321 (uid 54321): no room; why: GPU 0 is full; fix: wait";
        let words = LastRefusal { uid: 54321, ..last }.words(false);
        assert!(words.ends_with(users), "{words}");
    }

    #[test]
    fn a_host_without_reservations_needs_no_column_for_them() {
        let mut status = status();
        status.devices[0].reserved = None;
        let text = tables_of(&status, None, None, false);
        let header = "GPU NAME MODE MEMORY USED OF SM BUSY BOOKED LEASES";
        let is_header = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ") == header;
        assert!(text.lines().any(is_header), "{text}");
        assert!(text.lines().next().is_some_and(|line| line.len() > 80), "a pipe has whole lines: {text}");
    }
}
