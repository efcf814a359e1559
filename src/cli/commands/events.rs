//! `sublet events`: what happened to leases, MPS daemons and MIG instances.

use std::io::stdout;
use std::time::{Duration, SystemTime};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::AsFd as _;

use super::doctor::ask_engines;
use super::tables::Format;
use crate::events::{Reader, parse_moment};
use crate::names::{KnownBy, Names, Of, Owner, is_another, of_user, user};
use sublet_core::admit::is_remote;
use sublet_core::config::Config;
use sublet_core::events::{Event, Kind};
use sublet_core::inventory::{self, Device, Inventory};
use sublet_core::place;
use sublet_core::text::{safe, short_id};

/// How often `--follow` looks.
const PERIOD: Duration = Duration::from_secs(1);

/// Arguments of `sublet events`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Since then: 2026-11-23T07:00:00Z, 2026-11-23, seconds since 1970, or how long ago, as 10m
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    since: Option<SystemTime>,
    /// Until then
    #[arg(long, value_name = "TIME", value_parser = parse_moment, conflicts_with = "follow")]
    until: Option<SystemTime>,
    /// Only of this container: its name or id, its lease's id, or the beginning of one
    #[arg(long)]
    container: Option<String>,
    /// Only some: kind=refused, container=NAME, gpu=DEVICE. Of one key any may hold, of several keys each must
    #[arg(long, value_name = "KEY=VALUE", value_parser = filter)]
    filter: Vec<Filter>,
    #[command(flatten)]
    of: Of,
    /// Go on with what happens, until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// Output format: a line each, or one JSON object a line
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Clone, Debug, PartialEq)]
enum Filter {
    Kind(Kind),
    Container(String),
    Gpu(String),
}

fn filter(text: &str) -> Result<Filter, String> {
    match text.split_once('=') {
        Some(("kind", kind)) => {
            let known = Kind::ALL.iter().find(|known| <&str>::from(*known) == kind);
            let words = || Kind::ALL.iter().map(Into::into).collect::<Vec<&str>>().join(", ");
            let unknown = || format!("no kind is called {}: there are {}", safe(kind), words());
            known.copied().map(Filter::Kind).ok_or_else(unknown)
        }
        Some(("container", name)) => Ok(Filter::Container(name.to_owned())),
        Some(("gpu", device)) => Ok(Filter::Gpu(device.to_owned())),
        _ => Err(format!("{}: write kind=…, container=… or gpu=…", safe(text))),
    }
}

/// Runs it.
///
/// # Errors
/// A device that is asked for does not exist.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    let mut reader = Reader::default();
    let wanted = Wanted::of(arguments, config)?;
    let mut warned = None;
    loop {
        let (events, unread) = reader.new_events(config);
        if let Some(line) = unread.as_ref().filter(|_| unread != warned) {
            eprintln!("sublet: {line}");
        }
        warned = unread;
        let shown = Shown::read(config);
        let is_of = |event: &Event| arguments.of.has(&user(event.uid), shown.owner(event).as_ref());
        for event in events.into_iter().filter(|event| wanted.has(event, &shown) && is_of(event)) {
            let event = Event { text: shown.names.replace_ids_of(event.uid, &event.text), ..event };
            match arguments.format {
                Format::Json => {
                    let mut keys = serde_json::to_value(&event)?;
                    keys["name"] = shown.name(&event).into();
                    print!("{keys}\n");
                }
                Format::Table => println!("{}", shown.line(&event)),
            }
        }
        if !arguments.follow || !is_read_on() {
            return Ok(());
        }
        std::thread::sleep(PERIOD);
    }
}

/// Whether somebody still reads standard output. Where nothing happens, nothing is written that would tell.
fn is_read_on() -> bool {
    let stdout = stdout();
    let mut fds = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
    let polled = poll(&mut fds, PollTimeout::ZERO);
    let gone =
        fds[0].revents().is_some_and(|events| events.intersects(PollFlags::POLLERR | PollFlags::POLLHUP));
    super::closed_output::is_open() && !(polled.is_ok() && gone)
}

/// Which events are wanted.
struct Wanted {
    since: Option<String>,
    until: Option<String>,
    kinds: Vec<Kind>,
    containers: Vec<String>,
    /// UUIDs; `None`: of any device and of none.
    devices: Option<Vec<String>>,
}

impl Wanted {
    fn of(arguments: &Arguments, config: &Config) -> anyhow::Result<Self> {
        let mut wanted = Self {
            since: arguments.since.map(sublet_core::events::timestamp),
            until: arguments.until.map(sublet_core::events::timestamp),
            kinds: Vec::new(),
            containers: arguments.container.iter().cloned().collect(),
            devices: None,
        };
        for filter in &arguments.filter {
            match filter {
                Filter::Kind(kind) => wanted.kinds.push(*kind),
                Filter::Container(name) => wanted.containers.push(name.clone()),
                Filter::Gpu(device) => wanted.devices.get_or_insert_default().extend(named(device, config)?),
            }
        }
        // Names of users' containers are not kept.
        let asked = wanted.containers.iter().filter(|_| is_remote(config));
        let ids: Vec<_> = asked.filter_map(|name| ask_engines("{{.Id}}", name)).collect();
        wanted.containers.extend(ids);
        Ok(wanted)
    }

    fn has(&self, event: &Event, shown: &Shown) -> bool {
        // RFC 3339 in UTC with milliseconds: the order of texts is that of times.
        self.since.as_ref().is_none_or(|since| event.time >= *since)
            && self.until.as_ref().is_none_or(|until| event.time <= *until)
            && (self.kinds.is_empty() || self.kinds.contains(&event.kind))
            && (self.containers.is_empty() || self.containers.iter().any(|text| shown.is_of(event, text)))
            && (self.devices.iter()).all(|devices| devices.iter().any(|uuid| event.devices.contains(uuid)))
    }
}

/// UUIDs of the devices that `text` names. A device that is gone is named by its UUID.
fn named(text: &str, config: &Config) -> anyhow::Result<Vec<String>> {
    let known = inventory::last(config).ok().map(|inventory| inventory.with_left_out());
    let found = known.as_ref().map(|inventory| place::meant(text, inventory, config)).transpose();
    let found = found.map_err(anyhow::Error::msg)?.unwrap_or_default();
    match found[..] {
        [] if text.starts_with("GPU-") || text.starts_with("MIG-") => Ok(vec![text.to_owned()]),
        [] => Err(super::no_device(text)),
        _ => Ok(found.into_iter().map(|device| device.uuid.clone()).collect()),
    }
}

/// For showing events: the names of containers and the numbers of devices.
struct Shown {
    names: Names,
    inventory: Option<Inventory>,
}

impl Shown {
    fn read(config: &Config) -> Self {
        let names = Names::now(None, config);
        let inventory = (!is_remote(config)).then(|| inventory::last(config).ok()).flatten();
        Self { names, inventory: inventory.map(|inventory| inventory.with_left_out()) }
    }

    fn name(&self, event: &Event) -> Option<&str> {
        let refused = || self.names.of_id(&event.container_id).filter(|_| !is_another(event.uid));
        self.names.of_id(&event.lease).or_else(refused)?.called()
    }

    fn owner(&self, event: &Event) -> Option<Owner> {
        let name = self.names.of_id(&event.lease).or_else(|| self.names.of_id(&event.container_id));
        Owner::known(event.uid, &event.owner, name)
    }

    fn is_of(&self, event: &Event, text: &str) -> bool {
        let is_its_id = !is_another(event.uid) || self.name(event).is_some() || !self.names.knows(text);
        let id = is_its_id.then_some(event.container_id.as_str());
        let labels = [id, Some(event.lease.as_str()), self.name(event)];
        !text.is_empty() && labels.into_iter().flatten().any(|label| label.starts_with(text))
    }

    /// Time, kind, subject and text.
    fn line(&self, event: &Event) -> String {
        let mut words = vec![format!("{}  {:<14}", safe(&event.time), event.kind)];
        let id = || Some(short_id(&event.container_id)).filter(|id| !id.is_empty());
        words.extend(self.name(event).map(safe).or_else(id));
        words.extend(is_another(event.uid).then(|| of_user(event.uid)));
        let owner = self.owner(event).filter(|by| matches!(by.known_by, KnownBy::Claim | KnownBy::Label));
        words.extend(owner.map(|owner| format!("for {}", owner.words())));
        let number = |uuid: &String| {
            let device = self.inventory.as_ref().and_then(|inventory| inventory.device(uuid));
            device.map_or_else(|| safe(uuid), Device::label)
        };
        let numbers: Vec<_> = event.devices.iter().map(number).collect();
        words.extend((!numbers.is_empty()).then(|| format!("on {}", numbers.join(", "))));
        words.extend(Some(crate::shown::escaped(&event.text)).filter(|text| !text.is_empty()));
        let took = event.took_ms.map(Duration::from_millis);
        words.extend(took.map(|took| format!("after {}", humantime::format_duration(took))));
        words.join(" ").trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables::wrapped;
    use super::*;
    use crate::names::Name;
    use sublet_core::ledger::fixture::lease;

    #[test]
    fn filters_are_understood_and_misspelt_ones_refused() {
        assert_eq!(filter("kind=refused"), Ok(Filter::Kind(Kind::Refused)));
        assert_eq!(filter("container=web"), Ok(Filter::Container("web".into())));
        assert!(filter("kind=refuse").unwrap_err().contains("there are lease-taken, "));
        assert_eq!(filter("a\u{1b}").unwrap_err(), "a\\u{1b}: write kind=…, container=… or gpu=…");
    }

    #[test]
    fn a_line_has_time_kind_container_place_and_reason() {
        let shown = Shown { names: Names::default(), inventory: None };
        let event = Event {
            time: "2026-11-23T07:00:00.123Z".into(),
            container_id: "0123456789abcdef\u{1b}".into(),
            devices: vec!["GPU-1".into()],
            text: "no\nplace".into(),
            took_ms: Some(1500),
            ..Event::now(Kind::Refused)
        };
        assert_eq!(
            shown.line(&event),
            "2026-11-23T07:00:00.123Z  refused        0123456789abcdef\\u{1b} on GPU-1 no\\nplace after 1s 500ms"
        );
        let long = Event {
            text: "no room for mps, 50 % SM, 8 GiB: GPU 0 has 40 % SM left".into(),
            took_ms: None,
            ..event.clone()
        };
        assert_eq!(
            wrapped(&shown.line(&long), Some(80)).lines().collect::<Vec<_>>(),
            [
                "2026-11-23T07:00:00.123Z  refused        0123456789abcdef\\u{1b} on GPU-1 no room",
                "                                         for mps, 50 % SM, 8 GiB: GPU 0 has 40 %",
                "                                         SM left",
            ]
        );
        assert!(shown.is_of(&event, "01234") && !shown.is_of(&event, "") && !shown.is_of(&event, "x"));
    }

    #[test]
    fn a_users_event_about_roots_container_is_not_taken_for_its_own() {
        let mut held = lease(1, "GPU-0");
        held.container.id = "0123456789ab".to_owned();
        let names = Names::for_test(&held, Name { name: "web".into(), ..Name::default() });
        let shown = Shown { names, inventory: None };
        let (container_id, text) = (held.container.id.clone(), "of 0123456789ab".to_owned());
        let roots = Event { lease: held.id.to_string(), container_id, text, ..Event::now(Kind::Refused) };
        let users = Event { uid: 54321, lease: String::new(), ..roots.clone() };
        for text in ["web", "0123"] {
            assert!(shown.is_of(&roots, text) && !shown.is_of(&users, text), "{text}");
        }
        assert!(shown.is_of(&Event { container_id: "other".into(), ..users.clone() }, "oth"));
        assert_eq!(shown.names.replace_ids_of(roots.uid, &roots.text), "of web");
        assert_eq!(shown.names.replace_ids_of(users.uid, &users.text), "of 0123456789ab");
        let line = shown.line(&users);
        assert!(line.ends_with(" 0123456789ab of user 54321 (uid 54321) of 0123456789ab"), "{line}");
    }

    #[test]
    fn times_and_kinds_choose() {
        let shown = Shown { names: Names::default(), inventory: None };
        let event = Event { time: "2026-11-23T07:00:00.123Z".into(), ..Event::now(Kind::Drained) };
        let wanted = |since: &str, until: &str, kinds: &[Kind]| Wanted {
            since: Some(since.to_owned()),
            until: Some(until.to_owned()),
            kinds: kinds.to_vec(),
            containers: Vec::new(),
            devices: None,
        };
        let (early, late) = ("2026-11-23T07:00:00.000Z", "2026-11-23T08:00:00.000Z");
        assert!(wanted(early, late, &[]).has(&event, &shown));
        assert!(wanted(early, late, &[Kind::Drained, Kind::Refused]).has(&event, &shown));
        assert!(!wanted(early, late, &[Kind::Refused]).has(&event, &shown));
        assert!(
            !wanted(late, late, &[]).has(&event, &shown) && !wanted(early, early, &[]).has(&event, &shown)
        );
    }
}
