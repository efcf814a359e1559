//! The known facts of one container, whether it holds a lease, has ended or was refused.

use super::super::doctor::ask_engines;
use super::super::reason::ExplainError;
use super::super::status::label;
use super::super::tables;
use super::Arguments;
use super::answer::Amounts;
use super::of_share::{ShownNode, shown_node};
use crate::events::Reader;
use crate::mps_daemons::{self, Listed};
use crate::names::{self, Known, Name, Names, NoLease, is_another, lease_of};
use crate::preview::Whose;
use crate::shown::{escaped, word};
use crate::status::LeaseUsed;
use crate::usage::{self, Usage};
use schemars::JsonSchema;
use serde::Serialize;
use sublet_core::admit::is_remote;
use sublet_core::config::Config;
use sublet_core::events;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{Lease, Ledger, Store, SuspendStep, Suspension};
use sublet_core::oci::{EditsShown, JsonFile, edits_shown};
use sublet_core::place::{place_of, why_kept_away};
use sublet_core::text::safe;

/// One part of the answer, for people: its title and lines. Each is made by one function below, and printed in the order
/// of [`run`].
type Section = (&'static str, Vec<String>);

fn section<'r>(title: &'static str, rows: impl IntoIterator<Item = (&'r str, String)>) -> Section {
    (title, rows.into_iter().map(|(name, text)| format!("{name:<10} {text}")).collect())
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
    /// As in `sublet status`, or `ended`; `none`: it holds no lease and held none.
    state: String,
    /// When the lease was taken: RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    /// Of a container that has ended: RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_seen: Option<String>,
    /// Its first process, on the host.
    pid: Option<i32>,
    /// GPU memory that is in host memory, or on its way, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    suspended_bytes: Option<u64>,
    /// Since when: RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    suspended_since: Option<String>,
    /// Its place among those who wait, from 1, if it comes back by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<usize>,
    /// The user whose engine it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    /// What its engine calls it.
    #[schemars(with = "Option<NameKeys>")]
    name: Option<Name>,
}

// The library's type has no schema, because the programs that start containers would carry it.
/// A container, as people know it. Texts are as the engine has them: they may hold anything, and are cut.
#[derive(JsonSchema)]
#[schemars(rename = "Name")]
#[expect(dead_code, reason = "it exists for its schema")]
struct NameKeys {
    /// `docker`, `podman` or `containerd`; null: none that is known has it.
    engine: Option<String>,
    /// The engine's name for it; empty without one.
    name: String,
    /// Its image, as given to the engine.
    image: String,
    /// `PROJECT/SERVICE` of Compose, or `NAMESPACE/POD`; empty if it is part of neither.
    part_of: String,
    /// The systemd unit that its first process runs in; empty without one.
    unit: String,
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

impl Happened {
    fn line(&self) -> String {
        let Self { time, kind, text } = self;
        match kind.as_str() {
            "guard" => format!("{time}  {text}"),
            "refused" => format!("{time}  refused: {text}"),
            kind => format!("{time}  {kind} {text}").trim_end().to_owned(),
        }
    }
}

/// The container that is meant.
struct Found<'a> {
    lease: Option<&'a Lease>,
    /// Its leases that have ended, the last one first. Only looked for if it holds none.
    ended: Vec<(&'a str, &'a Known)>,
    /// Beginnings of its id, of which a refusal or an action of the guard may be recorded.
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
pub fn run(text: &str, arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    let whose = Whose::meant(arguments.rootless, config);
    let ledger = Store::open(&config.state_dir)?.peek()?;
    let names = Names::learn(&ledger, config);
    let found = find(text, &ledger, &names)?;
    let is_remote = is_remote(config);
    let history = events(&found, &names, whose, config);
    let mut document = Document { schema: "sublet.explain-container/1", ..Document::default() };
    let mut sections = Vec::new();
    if let Some(lease) = found.lease {
        let inventory = whose.inventory(config)?;
        let place = place_of(&lease.id, &ledger.waiters, &inventory, config);
        let away = why_kept_away(lease, (&inventory, &ledger, config));
        sections.push(held(lease, (place, away), names.of(lease), &mut document));
        let all = inventory.with_left_out();
        sections.push(limits(lease, &all, &mut document));
        let (of_use, used) =
            used(lease, &inventory, &ledger, &usage::of_host(&ledger, &inventory, usage::SAMPLED, config));
        sections.push(of_use);
        document.used = Some(used);
        sections.extend(mps_server(lease, config, &mut document)?);
        sections.extend(given(lease, is_remote, &all, &mut document));
    } else if let [last, earlier @ ..] = &found.ended[..] {
        sections.push(ended(*last, earlier, &mut document));
        // It, or another of its name: this is what its user looks for.
        let refused = history.last().filter(|last| last.kind == "refused");
        sections.extend(refused.map(|last| ("Refused since then", vec![format!("at {}", last.time)])));
    } else if history.is_empty() {
        return Err(ExplainError::NoContainer(safe(text)).into());
    } else {
        "none".clone_into(&mut document.container.state);
        let rows = [("name", safe(text)), ("state", "holds no lease".to_owned())];
        sections.push(section("Container", rows));
    }
    if !history.is_empty() {
        sections.push(("History", history.iter().map(Happened::line).collect()));
        document.history = Some(history);
    }
    let shown = |(title, lines): &Section| format!("{title}\n  {}", lines.join("\n  "));
    let text = || sections.iter().map(shown).collect::<Vec<_>>().join("\n\n");
    tables::print(arguments.format, &document, text)
}

/// By what sublet knows, else by what an engine calls a container that never held a lease.
fn find<'a>(text: &'a str, ledger: &'a Ledger, names: &'a Names) -> anyhow::Result<Found<'a>> {
    let known = |text: &str| match lease_of(text, ledger, names) {
        Ok(lease) => Ok((Some(lease), Vec::new())),
        Err(NoLease::None(_)) => Ok((None, names.ended(text, ledger))),
        Err(several) => Err(several),
    };
    let mut ids = vec![text.to_owned()];
    let (mut lease, mut ended) = known(text)?;
    if lease.is_none() && ended.is_empty() && names.refused(text).next().is_none() {
        if let Some(id) = ask_engines("{{.Id}}", text) {
            (lease, ended) = known(&id)?;
            ids.push(id);
        }
    }
    ids.extend(lease.map(|lease| lease.container.id.clone()));
    ids.extend(ended.iter().map(|(_, known)| known.container_id.clone()));
    ids.extend(names.refused(text).map(str::to_owned));
    ids.retain(|id| !id.is_empty());
    Ok(Found { lease, ended, ids })
}

/// Rows with its names.
fn called(name: Option<&Name>) -> Vec<(&'static str, String)> {
    let Some(name) = name else { return Vec::new() };
    let engine = name.engine.map(|engine| word(&engine)).unwrap_or_default();
    let texts = [("image", &name.image), ("part of", &name.part_of), ("unit", &name.unit)];
    let texts = texts.map(|(key, text)| (key, safe(text)));
    [("engine", engine)].into_iter().chain(texts).filter(|(_, text)| !text.is_empty()).collect()
}

fn held(
    lease: &Lease,
    (place, away): (Option<usize>, Option<String>),
    name: Option<&Name>,
    document: &mut Document,
) -> Section {
    let has_ended = !lease.is_of_job() && lease.init.as_ref().is_some_and(|init| !init.process.is_alive());
    let state = if has_ended { "ended".to_owned() } else { word(&lease.shown_state()) };
    let noted = if has_ended { ", which the next command notes" } else { "" };
    let pid = lease.init.as_ref().map(|init| init.process.pid);
    let (user, since) = (names::user(lease.container.uid), tables::timestamp(lease.since));
    let mut rows = vec![("name", label(lease, name)), ("id", safe(&lease.container.id))];
    rows.extend(called(name));
    rows.extend([("user", user.clone()), ("lease", lease.id.to_string())]);
    rows.push(("state", format!("{state}{noted}, since {since}")));
    rows.extend(pid.map(|pid| ("pid", pid.to_string())));
    let own = lease.suspension.as_ref();
    let why = |own| ("suspended", why_it_waits(own, (place, lease.destination()), &label(lease, name)));
    rows.extend(own.map(why));
    rows.extend(away.map(|away| ("stays so", away)));
    document.container = ContainerFacts {
        container_id: Some(lease.container.id.clone()),
        lease: Some(lease.id.to_string()),
        state,
        since: Some(since),
        pid,
        suspended_bytes: own.map(Suspension::bytes),
        suspended_since: own.map(|own| tables::timestamp(own.began())),
        place: own.and(place),
        user: Some(user),
        name: name.cloned(),
        ..ContainerFacts::default()
    };
    section("Container", rows)
}

/// Why it does not compute now, and what it waits for, at its `place` among those who wait, or on its way to the GPU `there`.
fn why_it_waits(own: &Suspension, (place, there): (Option<usize>, Option<&str>), name: &str) -> String {
    let (mib, since) = (own.bytes() >> 20, tables::timestamp(own.began()));
    let on_its_way = |way: &str| format!("{mib} MiB of GPU memory are on their way {way}, since {since}");
    let goes_on = match place {
        Some(place) => format!(
            "it made room for another container and comes back by itself, as number {place} of those who wait"
        ),
        None => format!("it goes on after `sublet resume {name}`"),
    };
    match (own.step, there) {
        (_, Some(gpu)) => on_its_way(&format!("to {}; it goes on then", safe(gpu))),
        (SuspendStep::Suspending, None) => on_its_way("into host memory"),
        (SuspendStep::Suspended | SuspendStep::Adding, None) => {
            format!("{mib} MiB of GPU memory are in host memory since {since}; {goes_on}")
        }
        (SuspendStep::Resuming | SuspendStep::Arriving, None) => on_its_way("back; it goes on then"),
    }
}

/// `earlier` are its leases before, the last one first.
fn ended((lease, known): (&str, &Known), earlier: &[(&str, &Known)], document: &mut Document) -> Section {
    let (Known { name, container_id, .. }, seen) = (known, tables::timestamp(known.seen));
    let mut rows = vec![("name", safe(&name.name)), ("id", safe(container_id))];
    rows.extend(called(Some(name)));
    rows.extend([("lease", safe(lease)), ("state", format!("ended; it was last seen at {seen}"))]);
    rows.extend(earlier.iter().map(|(lease, known)| {
        ("before", format!("lease {}, last seen at {}", safe(lease), tables::timestamp(known.seen)))
    }));
    rows.retain(|(_, text)| !text.is_empty());
    document.container = ContainerFacts {
        container_id: Some(container_id.clone()),
        lease: Some(lease.to_owned()),
        state: "ended".to_owned(),
        last_seen: Some(seen),
        name: Some(name.clone()),
        ..ContainerFacts::default()
    };
    section("Container", rows)
}

fn limits(lease: &Lease, inventory: &Inventory, document: &mut Document) -> Section {
    let amounts = Amounts::of(lease, inventory);
    let gone = lease.devices.iter().filter(|uuid| inventory.device(uuid).is_none());
    let gone = gone.map(|uuid| ("GPU", format!("{}, which this host no longer has", safe(uuid))));
    let rows: Vec<_> = gone.chain(amounts.rows()).collect();
    document.share = Some(amounts);
    section("Share", rows)
}

/// Its use of each device now. Values that the driver does not report are left open.
fn used(
    lease: &Lease,
    inventory: &Inventory,
    ledger: &Ledger,
    usage: &Usage,
) -> (Section, Vec<UsedOfDevice>) {
    let (mut rows, mut values) = (Vec::new(), Vec::new());
    for uuid in &lease.devices {
        let used = usage.of_lease(lease, uuid, ledger);
        let unknown = || "not known".to_owned();
        let memory = |bytes: Option<u64>| bytes.map_or_else(unknown, |bytes| format!("{} MiB", bytes >> 20));
        let busy = match (used.sm_percent, used.server_sm_percent) {
            (Some(own), _) => format!("{own} % of the SMs"),
            (None, Some(all)) => {
                format!("n/a of {all} % of the SMs, which its MPS server's containers use together")
            }
            (None, None) => unknown(),
        };
        let device = inventory.device(uuid).map_or_else(|| safe(uuid), Device::label);
        rows.extend([("memory", format!("{} on {device}", memory(used.memory_bytes))), ("busy", busy)]);
        let processes = usage.devices.get(uuid).into_iter().flat_map(|device| device.of_lease(lease));
        rows.extend(processes.map(|process| {
            let holder = &process.holder;
            let memory = memory(holder.memory_bytes);
            ("process", format!("{} {}, {memory}", holder.process.pid, safe(&holder.name)))
        }));
        values.push(UsedOfDevice { device: uuid.clone(), used });
    }
    (section("Used", rows), values)
}

fn mps_server(lease: &Lease, config: &Config, document: &mut Document) -> anyhow::Result<Option<Section>> {
    let Some(key) = &lease.daemon else { return Ok(None) };
    let daemons = mps_daemons::list(&Store::open(&config.state_dir)?, config)?;
    let daemon = daemons.into_iter().find(|daemon| daemon.key == *key);
    let state = daemon.as_ref().map_or_else(|| "not running".to_owned(), |daemon| word(&daemon.state));
    let mut rows = vec![("key", key.to_string()), ("state", state)];
    if let Some(daemon) = &daemon {
        rows.extend(daemon.pid.map(|pid| ("pid", pid.to_string())));
        rows.extend(daemon.clients.map(|clients| ("clients", clients.to_string())));
        let (percent, memory) = (daemon.ceiling_percent, tables::memory_limit(daemon.ceiling_memory_bytes));
        rows.push(("ceiling", format!("{percent} % of the SMs, memory {memory}, for each client")));
    }
    document.mps = Some(daemon.map_or(MpsDaemon::None, MpsDaemon::Runs));
    Ok(Some(section("MPS server", rows)))
}

/// The nodes and variables that it has: those in its config.json, with the GPU that it has moved to.
fn given(lease: &Lease, is_remote: bool, inventory: &Inventory, document: &mut Document) -> Vec<Section> {
    let read = || -> Option<EditsShown> {
        let file = JsonFile::read(&lease.container.bundle.join("config.json")).ok()?;
        edits_shown(&file.parse().ok()?).map(|edits| since_move(edits, lease, inventory))
    };
    let Some(edits) = names::is_own(lease, is_remote).then(read).flatten() else { return Vec::new() };
    let nodes =
        edits.nodes.iter().map(|node| format!("{} {}:{}", node.path.display(), node.major, node.minor));
    let environment = edits.environment.iter().map(|entry| safe(entry));
    let sections =
        vec![("Device nodes", nodes.collect()), ("Variables that sublet set", environment.collect())];
    document.nodes = Some(edits.nodes.into_iter().map(shown_node).collect());
    document.environment = Some(edits.environment);
    sections
}

/// `edits` of config.json, which stays as it is when a container moves, for the GPU that it has now.
fn since_move(mut edits: EditsShown, lease: &Lease, inventory: &Inventory) -> EditsShown {
    let Some(now) = lease.devices.first() else { return edits };
    for old in &lease.known {
        edits.environment.iter_mut().for_each(|entry| *entry = entry.replace(old.as_str(), now));
        let [left, has] = [old, now].map(|uuid| inventory.device(uuid));
        let (Some(left), Some(has)) = (left, has) else { continue };
        for (left, has) in [(&left.nodes, &has.nodes), (&left.dri_nodes, &has.dri_nodes)] {
            let Some(at) = edits.nodes.iter().position(|node| left.contains(node)) else { continue };
            edits.nodes.retain(|node| !left.contains(node));
            edits.nodes.splice(at..at, has.iter().cloned());
        }
    }
    edits
}

/// Time, kind and text of the events of its leases, and of other events that name it.
fn events(found: &Found<'_>, names: &Names, whose: Whose, config: &Config) -> Vec<Happened> {
    let dockers = whose == Whose::Root;
    let (events, unread) = Reader { dockers, ..Reader::default() }.new_events(config);
    if let Some(line) = unread {
        eprintln!("sublet: {line}");
    }
    let ended = found.ended.iter().map(|(lease, _)| *lease);
    let leases: Vec<&str> = found.lease.iter().map(|lease| lease.id.as_str()).chain(ended).collect();
    let by_id = |event: &events::Event| !event.container_id.is_empty() && found.is_id(&event.container_id);
    // One that is known by more than `--container` says and has no lease is root's, as is one of which root has a record.
    let is_roots = found.ids.len() > 1 || events.iter().any(|event| event.uid == 0 && by_id(event));
    let uid = found.lease.map(|lease| lease.container.uid).or(is_roots.then_some(0));
    let is_its = |event: &events::Event| {
        let may_name_it = !is_another(event.uid) || uid.is_none_or(|uid| uid == event.uid);
        let names_it = may_name_it && by_id(event);
        // Of a container that no engine is known to have had, nothing but events tells of its leases.
        leases.contains(&event.lease.as_str()) || names_it && (event.lease.is_empty() || leases.is_empty())
    };
    let row = |event: events::Event| Happened {
        time: safe(&event.time),
        kind: event.kind.to_string(),
        text: escaped(&names.replace_ids_of(event.uid, &event.text)),
    };
    events.into_iter().filter(is_its).map(row).collect()
}
