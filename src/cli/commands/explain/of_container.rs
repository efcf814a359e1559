//! What is known of one container, whether it holds a lease, has ended or was refused.

use std::process::ExitCode;

use super::super::doctor::ask;
use super::super::explain_error::ExplainError;
use super::super::{lease_table, tables};
use super::answer::Amounts;
use super::edits::ShownNode;
use super::of_share::inventory_for;
use super::{Arguments, whose};
use crate::events::Reader;
use crate::guard::{self, Event};
use crate::mps_daemons::{self, Listed};
use crate::names::{self, Ended, Name, Names, NoLease, lease_of};
use crate::preview::Whose;
use crate::status::LeaseUsed;
use crate::usage;
use nix::unistd::geteuid;
use schemars::JsonSchema;
use serde::Serialize;
use sublet_core::admit::{RefusalRecord, is_remote, refusals};
use sublet_core::config::Config;
use sublet_core::events::{self, Kind};
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{Lease, Ledger, Store};
use sublet_core::oci::{EditsShown, JsonFile, edits_shown};
use sublet_core::text::safe;

/// One part of the answer, for people. Each is made by one function below, and printed in the order of [`answer`].
struct Section {
    title: &'static str,
    lines: Vec<String>,
}

impl Section {
    fn rows<'r>(title: &'static str, rows: impl IntoIterator<Item = (&'r str, String)>) -> Self {
        let lines = rows.into_iter().map(|(name, text)| format!("{name:<10} {text}")).collect();
        Self { title, lines }
    }
}

/// What is printed as JSON: keys may be added, never changed. What is not known is left out.
#[derive(Default, Serialize, JsonSchema)]
#[schemars(rename = "ExplainContainer")]
pub struct Document {
    /// `sublet.explain-container/1`.
    schema: &'static str,
    container: ContainerFacts,
    #[serde(skip_serializing_if = "Option::is_none")]
    share: Option<Amounts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<Vec<UsedOfDevice>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mps: Option<MpsDaemon>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nodes: Option<Vec<ShownNode>>,
    /// The variables that sublet set, each `NAME=VALUE`.
    #[serde(skip_serializing_if = "Option::is_none")]
    environment: Option<Vec<String>>,
    /// What happened to it, the oldest first.
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<Vec<Happened>>,
}

/// Its MPS daemon; null: it does not run.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum MpsDaemon {
    Runs(Listed),
    None,
}

#[derive(Default, Serialize, JsonSchema)]
struct ContainerFacts {
    #[serde(skip_serializing_if = "Option::is_none")]
    container_id: Option<String>,
    /// Its lease, or its last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
    /// `pending`, `active`, `ending`, `lost`, `ended`; `none`: it holds no lease and held none.
    state: String,
    /// When the lease was taken: RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    /// Of a container that has ended: RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_seen: Option<String>,
    /// Its first process, on the host.
    pid: Option<i32>,
    /// The user whose engine it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    /// What its engine calls it.
    name: Option<Name>,
}

#[derive(Serialize, JsonSchema)]
struct UsedOfDevice {
    /// UUID of the GPU or MIG device.
    device: String,
    used: LeaseUsed,
}

/// Something that happened to it.
#[derive(Serialize, JsonSchema)]
struct Happened {
    /// RFC 3339.
    time: String,
    /// As in `sublet events`.
    kind: String,
    /// In one line.
    text: String,
}

/// The container that is meant.
struct Found<'a> {
    /// As it was asked for.
    text: &'a str,
    ledger: &'a Ledger,
    lease: Option<&'a Lease>,
    /// Its leases that have ended, the last one first. Only looked for if it holds none.
    ended: Vec<Ended<'a>>,
    names: &'a Names,
    /// What its id begins with, of which a refusal or an action of the guard may be recorded.
    ids: Vec<String>,
}

impl Found<'_> {
    fn is_id(&self, id: &str) -> bool {
        self.ids.iter().any(|own| id.starts_with(own.as_str()))
    }
}

/// Runs it.
///
/// # Errors
/// Nothing is known of the container, or its name means several.
pub fn run(text: &str, arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    let whose = whose::whose(arguments.rootless, config);
    let ledger = Store::open(&config.state_dir)?.peek()?;
    let names = Names::learn(&ledger, config);
    let found = find(text, &ledger, &names)?;
    let (sections, document) = answer(&found, whose, config)?;
    let shown = |section: &Section| format!("{}\n  {}", section.title, section.lines.join("\n  "));
    let text = || sections.iter().map(shown).collect::<Vec<_>>().join("\n\n");
    tables::print(arguments.format, &document, text)
}

/// By what sublet knows, else by what an engine calls a container that never held a lease.
fn find<'a>(text: &'a str, ledger: &'a Ledger, names: &'a Names) -> anyhow::Result<Found<'a>> {
    let lease_called = |text: &str| match lease_of(text, ledger, names) {
        Ok(lease) => Ok(Some(lease)),
        Err(NoLease::None(_)) => Ok(None),
        Err(several) => Err(several),
    };
    let mut ids = vec![text.to_owned()];
    let mut lease = lease_called(text)?;
    let mut ended = if lease.is_none() { names.ended(text, ledger) } else { Vec::new() };
    if lease.is_none() && ended.is_empty() {
        if let Some(id) = id_of_engine(text) {
            lease = lease_called(&id)?;
            ended = if lease.is_none() { names.ended(&id, ledger) } else { Vec::new() };
            ids.push(id);
        }
    }
    ids.extend(lease.map(|lease| lease.container.id.clone()));
    ids.extend(ended.iter().map(|ended| ended.container_id().to_owned()));
    ids.retain(|id| !id.is_empty());
    Ok(Found { text, ledger, lease, ended, names, ids })
}

/// The id of the container that Docker or Podman calls `name`.
fn id_of_engine(name: &str) -> Option<String> {
    let id = |engine| ask(&[engine, "container", "inspect", "--format", "{{.Id}}", "--", name]);
    let id = ["docker", "podman"].into_iter().find_map(id)?.trim().to_owned();
    (!id.is_empty()).then_some(id)
}

/// Everything there is to say, in order: for people, and for machines.
fn answer(found: &Found<'_>, whose: Whose, config: &Config) -> anyhow::Result<(Vec<Section>, Document)> {
    let (history, happened) = history(found, whose, config);
    let mut document = Document { schema: "sublet.explain-container/1", ..Document::default() };
    let mut sections = Vec::new();
    if let Some(lease) = found.lease {
        let inventory = inventory_for(whose, config)?;
        sections.push(held(lease, found.names.of(lease), &mut document));
        sections.push(limits(lease, &inventory.with_left_out(), &mut document));
        sections.push(used(lease, &inventory, found.ledger, config, &mut document));
        sections.extend(mps_server(lease, config, &mut document)?);
        sections.extend(given(lease, &mut document));
    } else if !found.ended.is_empty() {
        sections.push(ended(&found.ended, &mut document));
    } else if history.lines.is_empty() {
        return Err(ExplainError::NoContainer(safe(found.text)).into());
    } else {
        sections.push(refused(found, &mut document));
    }
    if !history.lines.is_empty() {
        sections.push(history);
        document.history = Some(happened);
    }
    Ok((sections, document))
}

/// What people call it.
fn called(name: Option<&Name>) -> Vec<(&'static str, String)> {
    let Some(name) = name else { return Vec::new() };
    let engine = name.engine.map(|engine| crate::shown::word(&engine));
    let texts = [("image", &name.image), ("part of", &name.part_of), ("unit", &name.unit)];
    let texts = texts.into_iter().filter(|(_, text)| !text.is_empty()).map(|(key, text)| (key, safe(text)));
    engine.map(|engine| ("engine", engine)).into_iter().chain(texts).collect()
}

fn held(lease: &Lease, name: Option<&Name>, document: &mut Document) -> Section {
    let has_ended = !lease.is_of_job() && lease.init.as_ref().is_some_and(|init| !init.process.is_alive());
    let state = if has_ended {
        "ended, which the next command notes".to_owned()
    } else {
        crate::shown::word(&lease.state)
    };
    let pid = lease.init.as_ref().map(|init| init.process.pid);
    let mut rows = vec![("name", lease_table::label(lease, name)), ("id", safe(&lease.container.id))];
    rows.extend(called(name));
    rows.push(("user", names::user(lease.container.uid)));
    rows.push(("lease", lease.id.to_string()));
    rows.push(("state", format!("{state}, since {}", tables::timestamp(lease.since))));
    rows.extend(pid.map(|pid| ("pid", pid.to_string())));
    document.container = ContainerFacts {
        container_id: Some(lease.container.id.clone()),
        lease: Some(lease.id.to_string()),
        state: if has_ended { "ended".to_owned() } else { crate::shown::word(&lease.state) },
        since: Some(tables::timestamp(lease.since)),
        pid,
        user: Some(names::user(lease.container.uid)),
        name: name.cloned(),
        ..ContainerFacts::default()
    };
    Section::rows("Container", rows)
}

fn ended(ended: &[Ended<'_>], document: &mut Document) -> Section {
    let last = &ended[0];
    let name = last.name();
    let mut rows = vec![("name", safe(&name.name)), ("id", safe(last.container_id()))];
    rows.extend(called(Some(name)));
    rows.push(("lease", safe(last.lease)));
    rows.push(("state", format!("ended; it was last seen at {}", tables::timestamp(last.seen()))));
    let earlier = |ended: &Ended<'_>| {
        ("before", format!("lease {}, last seen at {}", safe(ended.lease), tables::timestamp(ended.seen())))
    };
    rows.extend(ended[1..].iter().map(earlier));
    rows.retain(|(_, text)| !text.is_empty());
    document.container = ContainerFacts {
        container_id: Some(last.container_id().to_owned()),
        lease: Some(last.lease.to_owned()),
        state: "ended".to_owned(),
        last_seen: Some(tables::timestamp(last.seen())),
        name: Some(name.clone()),
        ..ContainerFacts::default()
    };
    Section::rows("Container", rows)
}

fn refused(found: &Found<'_>, document: &mut Document) -> Section {
    "none".clone_into(&mut document.container.state);
    Section::rows("Container", [("name", safe(found.text)), ("state", "holds no lease".to_owned())])
}

fn limits(lease: &Lease, inventory: &Inventory, document: &mut Document) -> Section {
    let amounts = Amounts::of(lease, inventory);
    let gone = lease.devices.iter().filter(|uuid| inventory.device(uuid).is_none());
    let gone = gone.map(|uuid| ("GPU", format!("{}, which this host no longer has", safe(uuid))));
    let rows: Vec<_> = gone.chain(amounts.rows()).collect();
    document.share = Some(amounts);
    Section::rows("Share", rows)
}

/// What it uses of each device now. What the driver does not report is left open.
fn used(
    lease: &Lease,
    inventory: &Inventory,
    ledger: &Ledger,
    config: &Config,
    document: &mut Document,
) -> Section {
    let usage = usage::of_host(ledger, inventory, config);
    let (mut rows, mut values) = (Vec::new(), Vec::new());
    for uuid in &lease.devices {
        let used = LeaseUsed::of(usage.of_lease(lease, uuid, ledger));
        let unknown = || "not known".to_owned();
        let memory = used.memory_bytes.map_or_else(unknown, |bytes| format!("{} MiB", bytes >> 20));
        let busy = match (used.sm_percent, used.server_sm_percent) {
            (Some(own), _) => format!("{own} % of the SMs"),
            (None, Some(all)) => {
                format!("n/a of {all} % of the SMs, which its MPS server's containers use together")
            }
            (None, None) => unknown(),
        };
        let device = inventory.device(uuid).map_or_else(|| safe(uuid), Device::label);
        rows.push(("memory", format!("{memory} on {device}")));
        rows.push(("busy", busy));
        let processes = usage.devices.get(uuid).into_iter().flat_map(|device| device.of_lease(lease));
        rows.extend(processes.map(|process| {
            let memory =
                process.holder.memory_bytes.map_or_else(unknown, |bytes| format!("{} MiB", bytes >> 20));
            ("process", format!("{} {}, {memory}", process.holder.process.pid, safe(&process.holder.name)))
        }));
        values.push(UsedOfDevice { device: uuid.clone(), used });
    }
    document.used = Some(values);
    Section::rows("Used", rows)
}

fn mps_server(lease: &Lease, config: &Config, document: &mut Document) -> anyhow::Result<Option<Section>> {
    let Some(key) = &lease.daemon else { return Ok(None) };
    let daemons = mps_daemons::list(&Store::open(&config.state_dir)?, config)?;
    let daemon = daemons.into_iter().find(|daemon| daemon.key == *key);
    document.mps = Some(daemon.clone().map_or(MpsDaemon::None, MpsDaemon::Runs));
    let Some(daemon) = daemon else {
        let rows = [("key", key.to_string()), ("state", "not running".to_owned())];
        return Ok(Some(Section::rows("MPS server", rows)));
    };
    let mut rows = vec![("key", key.to_string()), ("state", crate::shown::word(&daemon.state))];
    rows.extend(daemon.pid.map(|pid| ("pid", pid.to_string())));
    rows.extend(daemon.clients.map(|clients| ("clients", clients.to_string())));
    let memory = tables::memory_limit(daemon.ceiling_memory_bytes);
    rows.push((
        "ceiling",
        format!("{} % of the SMs, memory {memory}, for each client", daemon.ceiling_percent),
    ));
    Ok(Some(Section::rows("MPS server", rows)))
}

/// The nodes and variables in its config.json.
fn given(lease: &Lease, document: &mut Document) -> Vec<Section> {
    let read = || -> Option<EditsShown> {
        let file = JsonFile::read(&lease.container.bundle.join("config.json")).ok()?;
        edits_shown(&file.parse().ok()?)
    };
    let Some(edits) = names::is_own(lease).then(read).flatten() else { return Vec::new() };
    let nodes =
        edits.nodes.iter().map(|node| format!("{} {}:{}", node.path.display(), node.major, node.minor));
    let environment = edits.environment.iter().map(|entry| safe(entry));
    let sections = vec![
        Section { title: "Device nodes", lines: nodes.collect() },
        Section { title: "Variables that sublet set", lines: environment.collect() },
    ];
    document.nodes = Some(edits.nodes.into_iter().map(ShownNode::from).collect());
    document.environment = Some(edits.environment);
    sections
}

/// What happened to it, the oldest first.
fn history(found: &Found<'_>, whose: Whose, config: &Config) -> (Section, Vec<Happened>) {
    let all =
        if is_remote(config) { read_own_records(found, whose, config) } else { read_events(found, config) };
    let line = |Happened { time, kind, text }: &Happened| match kind.as_str() {
        "guard" => format!("{time}  {text}"),
        "refused" => format!("{time}  refused: {text}"),
        kind => format!("{time}  {kind} {text}").trim_end().to_owned(),
    };
    (Section { title: "History", lines: all.iter().map(line).collect() }, all)
}

/// Time, kind and text of the events of its leases, and of other events that name it.
fn read_events(found: &Found<'_>, config: &Config) -> Vec<Happened> {
    let (events, unread) = Reader::default().new_events(config);
    if let Some(line) = unread {
        eprintln!("sublet: {line}");
    }
    let leases: Vec<&str> = found
        .lease
        .map(|lease| lease.id.as_str())
        .into_iter()
        .chain(found.ended.iter().map(|ended| ended.lease))
        .collect();
    let is_its = |event: &events::Event| {
        let names_it = !event.container_id.is_empty() && found.is_id(&event.container_id);
        // Of a container that no engine is known to have had, nothing but events tells of its leases.
        leases.contains(&event.lease.as_str()) || names_it && (event.lease.is_empty() || leases.is_empty())
    };
    let row = |event: events::Event| Happened {
        time: safe(&event.time),
        kind: event.kind.to_string(),
        text: crate::shown::escaped(&event.text),
    };
    events.into_iter().filter(is_its).map(row).collect()
}

/// The same for a user, who may not read all that happened: refusals, and what the guard did.
fn read_own_records(found: &Found<'_>, whose: Whose, config: &Config) -> Vec<Happened> {
    let us = geteuid().as_raw();
    let may_see = |record: &RefusalRecord| record.uid == us || whose == Whose::Root && record.uid == 0;
    let is_its = |record: &RefusalRecord| may_see(record) && found.is_id(&record.container_id);
    let refused = refusals(config).into_iter().filter(is_its);
    let kind = |record: &RefusalRecord| if record.started { Kind::Warned } else { Kind::Refused };
    let refused = refused.map(|record| (record.time, kind(&record).into(), record.reason));
    let is_guarded = |event: &Event| event.container_id.as_deref().is_some_and(|id| found.is_id(id));
    let guarded =
        guard::events(config).into_iter().filter(is_guarded).map(|event| (event.time, "guard", event.text));
    let mut all: Vec<_> = refused.chain(guarded).collect();
    all.sort_by_key(|(time, ..)| *time);
    let row = |(time, kind, text): (u64, &str, String)| Happened {
        time: tables::timestamp(time),
        kind: kind.to_owned(),
        text,
    };
    all.into_iter().map(row).collect()
}
