//! Starts refused containers of Docker's again: Docker retries no start that its runtime has refused, whatever the container's
//! restart policy.
//!
//! Who waits is in the ledger, where root's own entry points alone write it when they refuse. That is not enough to start a
//! container: Docker must say of it that its last start failed with the very words of that refusal, and that nobody has
//! touched it since.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use anyhow::{Context as _, ensure};
use nix::unistd::geteuid;
use serde_json::Value;

use crate::peer::Peer;
use crate::preview::{Whose, preview};
use sublet_core::admit::{AdmitError, Local, book_for, book_waiter, fresh_inventory};
use sublet_core::bounded_input;
use sublet_core::broker::client::connect_now;
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::inventory::{Inventory, load};
use sublet_core::ledger::{LeaseId, Ledger, Retry, Store, Waiter};
use sublet_core::process::{name_of, uptime_seconds};
use sublet_core::text::{first_line, safe_long};

/// The pause between two looks.
const PAUSE: Duration = Duration::from_secs(2);

/// The shortest time between two refreshes of the inventory, which ask the driver.
pub(super) const REFRESH: Duration = Duration::from_secs(30);

/// How long Docker may take to tell of a container, and to start one.
const TELL: Duration = Duration::from_secs(5);
const START: Duration = Duration::from_secs(60);

/// The longest answer, in bytes.
const LARGEST: usize = 1 << 20;

/// Where dockerd writes its pid, whose end removes it.
const PID_FILE: &str = "/run/docker.pid";

/// Docker's names of containers when they were first asked for. The ledger, which every user may read, has no names.
type Names = BTreeMap<LeaseId, String>;

/// The state between two looks.
#[derive(Default)]
struct Kept {
    names: Names,
    /// Of this look; `None`: there is none.
    inventory: Option<Inventory>,
    /// When the inventory was refreshed last.
    refreshed: Option<Instant>,
    /// The reasons that were warned of.
    warned: BTreeSet<String>,
}

/// The next step for a refused container.
#[derive(Debug, PartialEq)]
enum Step {
    /// Docker says that it is to be restarted, and is as the refusal left it.
    Confirm,
    Start,
    /// It is not as the refusal left it.
    Forget,
}

/// Starts the thread; it ends with the process.
pub(super) fn start(store: Store) -> io::Result<()> {
    let mut kept = Kept::default();
    let retry = move || {
        loop {
            thread::sleep(PAUSE);
            let looked = kept.look(&store);
            let _ = looked.inspect_err(|error| kept.warn(error));
        }
    };
    thread::Builder::new().name("retry".to_owned()).spawn(retry).map(drop)
}

impl Kept {
    /// Goes through all who wait in order. Who finds room has it, before those behind; of these, the containers of Docker's are
    /// started. Where there is none of Docker's, this reads the ledger alone, if it has changed.
    fn look(&mut self, store: &Store) -> anyhow::Result<()> {
        let waiters = store.peek()?.waiters;
        self.names.retain(|id, _| waiters.iter().any(|waiter| waiter.id == *id));
        if !waiters.iter().any(|waiter| waiter.retry.is_some()) {
            return Ok(());
        }
        let config = &config_files::load()?;
        let local = Local::new(config);
        let mut ahead = local.update(|ledger| ledger.clone())?;
        let now = Some(Instant::now()).filter(|_| self.may_refresh());
        self.inventory = if now.is_some() { fresh_inventory(config).ok() } else { load(config).ok() };
        self.refreshed = now.filter(|_| self.inventory.is_none()).or(self.refreshed);
        // Each is placed behind those before it, which are booked.
        for waiter in std::mem::take(&mut ahead.waiters) {
            let asked = match waiter.retry {
                Some(_) if config.retry.docker => is_as_refused(&waiter, &mut self.names, config),
                _ => Ok(waiter.retry.is_none()),
            };
            let _ = asked.as_ref().inspect_err(|error| self.warn(error));
            let note = |step: fn(&mut Retry)| local.update(|ledger| ledger.retry_mut(&waiter.id).map(step));
            if asked.is_err() && waiter.retry.as_ref().is_some_and(Retry::is_due) {
                note(Retry::postpone)?;
            }
            match self.step(&waiter, asked.ok(), &mut ahead, config) {
                Some(Step::Confirm) => drop(note(|retry| retry.confirmed = true)?),
                Some(Step::Start) => {
                    // Its entry goes when it gets its lease; if it is refused again, it keeps its place.
                    note(Retry::note_start)?;
                    let id = &waiter.container.id;
                    let (status, why) = ask("POST", &format!("/containers/{id}/start"), START, config)?;
                    let why = safe_long(&why, 1000);
                    tracing::info!("container {id} is started: Docker says {status} {why}");
                }
                // One that was refused anew meanwhile is another.
                Some(Step::Forget) => local.update(|ledger| ledger.waiters.retain(|one| *one != waiter))?,
                None => {}
            }
        }
        Ok(())
    }

    /// The next step for `waiter`; `None` for `asked`: Docker does not say. Books in the ledger, which is not written,
    /// the share that it finds room for, whether it is its time or not.
    fn step(
        &mut self,
        waiter: &Waiter,
        asked: Option<bool>,
        ahead: &mut Ledger,
        config: &Config,
    ) -> Option<Step> {
        if asked == Some(false) {
            return Some(Step::Forget);
        }
        let has_room = self.find_room(waiter, ahead, config).is_some();
        let retry = waiter.retry.as_ref().filter(|_| asked.is_some())?;
        let starts = has_room && retry.from <= uptime_seconds();
        if retry.confirmed { starts.then_some(Step::Start) } else { Some(Step::Confirm) }
    }

    /// Whether the inventory may be refreshed now, however many wait.
    fn may_refresh(&self) -> bool {
        self.refreshed.is_none_or(|at| at.elapsed() >= REFRESH)
    }

    /// Whether there is room for what `waiter` waits for, which is then booked in the ledger `ahead`.
    fn find_room(&mut self, waiter: &Waiter, ahead: &mut Ledger, config: &Config) -> Option<()> {
        if ahead.lease(&waiter.id).is_some_and(|lease| lease.why_left_alone().is_some()) {
            return None;
        }
        if let (Some(_), Some(inventory)) = (&waiter.rule, &self.inventory) {
            return book_waiter(waiter, ahead, inventory, config).then_some(());
        }
        let (request, may_refresh) = (waiter.request()?, self.may_refresh());
        let sources = (self.inventory.as_mut()?, &*ahead, !may_refresh);
        let placed = preview(&request, &waiter.id, sources, Whose::Root, config);
        // A refresh that failed was one, too.
        let is_of_now = |error: &AdmitError| error.wants_refresh() || matches!(error, AdmitError::Own(_));
        if may_refresh && placed.as_ref().is_err_and(is_of_now) {
            self.refreshed = Some(Instant::now());
        }
        match placed {
            // An instance is created when it starts.
            Err(AdmitError::WouldMake { .. }) => {}
            placed => book_for((&waiter.id, &waiter.container), &placed.ok()?, ahead, config),
        }
        Some(())
    }

    /// Warns once of each reason.
    fn warn(&mut self, error: &anyhow::Error) {
        if self.warned.insert(error.to_string()) {
            tracing::warn!("refused containers are not started again: {error:#}");
        }
    }
}

/// Whether Docker is to restart the container of `waiter`, and the last that happened to it is the refusal.
///
/// # Errors
/// Docker does not say.
fn is_as_refused(waiter: &Waiter, names: &mut Names, config: &Config) -> anyhow::Result<bool> {
    let id = &waiter.container.id;
    let (status, answer) = ask("GET", &format!("/containers/{id}/json"), TELL, config)?;
    ensure!([200, 404].contains(&status), "Docker answers {status}");
    let answer: Value = serde_json::from_str(&answer).context("Docker's answer is no JSON")?;
    let text = |pointer| answer.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    // A restart by Docker itself, which is not over and may be refused (moby, `daemon/monitor.go`).
    ensure!(
        text("/State/Status") != "restarting",
        "Docker restarts a container that it could not start before"
    );
    let name = names.entry(waiter.id.clone()).or_insert_with(|| text("/Name").to_owned());
    // One that ran before has "exited". A start that succeeds takes the error away.
    Ok((text("/Id"), text("/Name")) == (id, name)
        && ["always", "unless-stopped"].contains(&text("/HostConfig/RestartPolicy/Name"))
        && ["created", "exited"].contains(&text("/State/Status"))
        // Behind its first line, the error that Docker got names containers.
        && text("/State/Error").contains(first_line(&waiter.why)))
}

/// Whether dockerd runs at its usual socket: systemd, which may listen there in its place, would start it (`docker.socket`).
fn is_dockerd_up(pid_file: &str, config: &Config) -> bool {
    let pid = || fs::read_to_string(pid_file).ok()?.trim().parse().ok();
    config.retry.socket != Config::default().retry.socket || pid().map(name_of).as_deref() == Some("dockerd")
}

/// Asks dockerd of root, which has to answer within `limit`. Returns the status and the body.
fn ask(method: &str, path: &str, limit: Duration, config: &Config) -> anyhow::Result<(u16, String)> {
    ensure!(is_dockerd_up(PID_FILE, config), "{PID_FILE} names no dockerd that runs");
    let until = Instant::now() + limit;
    let mut stream = connect_now(&config.retry.socket).context("nobody listens at Docker's socket")?;
    ensure!(Peer::of(&stream)?.uid == geteuid().as_raw(), "who listens at Docker's socket is not root");
    // By HTTP/1.0 the answer comes in one piece, and the connection ends with it. A request is far shorter than what the
    // kernel takes at once.
    let request = format!("{method} {path} HTTP/1.0\r\nHost: docker\r\nContent-Length: 0\r\n\r\n");
    let sent = stream.write_all(request.as_bytes());
    let answer = sent.and_then(|()| bounded_input::read(&stream, None, LARGEST, until));
    let answer = String::from_utf8_lossy(&answer.context("Docker does not answer")?).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").context("Docker's answer is cut off")?;
    let status = head.split(' ').nth(1).context("Docker's answer has no status")?;
    Ok((status.parse()?, body.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixListener;

    use serde_json::json;
    use sublet_core::ledger::fixture::lease;
    use sublet_core::ledger::{Container, Lease, LeaseState};
    use sublet_core::place::fixture::{device, host};
    use sublet_core::process::Process;
    use sublet_core::request;

    use super::*;

    /// [`is_as_refused`] if dockerd answers `answer`, of a container refused with `no room; why: it is full`.
    fn asked(answer: &str, name: &str) -> anyhow::Result<bool> {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.retry.socket = dir.path().join("docker.sock");
        let listener = UnixListener::bind(&config.retry.socket).unwrap();
        let id = LeaseId::parse("0000000000000001").unwrap();
        let container = Container { id: "web".to_owned(), ..Container::default() };
        let request = request::parse(&BTreeMap::new(), None, None, &config).unwrap();
        let waiter = Waiter::new(&id, &container, &request, "no room; why: it is full", None);
        let mut names = Names::from([(id, name.to_owned())]);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut head = [0; 512];
                let length = stream.read(&mut head).unwrap();
                assert!(head[..length].starts_with(b"GET /containers/web/json HTTP/1.0\r\n"));
                stream.write_all(answer.as_bytes()).unwrap();
            });
            is_as_refused(&waiter, &mut names, &config)
        })
    }

    fn answer_with(change: impl Fn(&mut Value)) -> String {
        let mut body = json!({"Id": "web", "Name": "/shop", "HostConfig": {"RestartPolicy": {"Name": "always"}},
            "State": {"Status": "created", "Error": "failed to create task: container web: no room\nwhy: it is full: unknown"}});
        change(&mut body);
        format!("HTTP/1.0 200 OK\r\nServer: Docker\r\n\r\n{body}")
    }

    #[test]
    fn a_container_that_is_not_as_the_refusal_left_it_is_not_started() {
        assert!(asked(&answer_with(|_| ()), "/shop").unwrap());
        assert!(asked(&answer_with(|body| body["State"]["Status"] = json!("exited")), "/shop").unwrap());
        assert!(!asked(&answer_with(|_| ()), "/other").unwrap(), "it was renamed");
        let changes: [fn(&mut Value); 6] = [
            |body| body["HostConfig"]["RestartPolicy"]["Name"] = json!("no"),
            |body| body["HostConfig"]["RestartPolicy"]["Name"] = json!("on-failure"),
            |body| body["State"]["Status"] = json!("running"),
            |body| body["State"]["Error"] = json!(""),
            |body| body["State"]["Error"] = json!("port is already allocated"),
            |body| body["Id"] = json!("webster"),
        ];
        for change in changes {
            assert!(!asked(&answer_with(change), "/shop").unwrap(), "{}", answer_with(change));
        }
        let gone = "HTTP/1.0 404 Not Found\r\n\r\n{\"message\":\"No such container: web\"}";
        assert!(!asked(gone, "/shop").unwrap(), "it was removed");
    }

    #[test]
    fn a_restart_by_docker_that_is_not_over_says_nothing_of_the_container() {
        for error in ["", "no room"] {
            let answer = answer_with(|body| {
                (body["State"]["Status"], body["State"]["Error"]) = (json!("restarting"), json!(error));
            });
            assert!(asked(&answer, "/shop").is_err(), "{error}");
        }
    }

    #[test]
    fn a_dockerd_that_was_stopped_is_not_asked_at_the_usual_socket() {
        let dir = tempfile::tempdir().unwrap();
        let [pid_file, program] = ["docker.pid", "dockerd"].map(|name| dir.path().join(name));
        let pid_file = pid_file.to_str().unwrap();
        let mut config = Config::default();
        assert!(!is_dockerd_up(pid_file, &config), "it has removed its file");
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut dockerd = std::process::Command::new(&program).arg("60").spawn().unwrap();
        fs::write(pid_file, dockerd.id().to_string()).unwrap();
        // It has its name a moment after execve(2) has let its parent go on.
        let began = Instant::now();
        while !is_dockerd_up(pid_file, &config) {
            assert!(began.elapsed() < Duration::from_secs(30), "it runs");
            thread::sleep(Duration::from_millis(2));
        }
        fs::write(pid_file, "1").unwrap();
        assert!(!is_dockerd_up(pid_file, &config), "it was killed, and another has its pid");
        dockerd.kill().unwrap();
        dockerd.wait().unwrap();
        config.retry.socket = dir.path().join("docker.sock");
        assert!(is_dockerd_up(pid_file, &config), "systemd listens at no other");
    }

    #[test]
    fn an_answer_that_drips_ends_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.retry.socket = dir.path().join("docker.sock");
        let listener = UnixListener::bind(&config.retry.socket).unwrap();
        let drips = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        assert!(ask("GET", "/", Duration::from_millis(200), &config).is_err());
        drips.join().unwrap();
    }

    #[test]
    fn who_listens_and_accepts_nothing_holds_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.retry.socket = dir.path().join("docker.sock");
        let _listener = UnixListener::bind(&config.retry.socket).unwrap();
        let full: Vec<_> = std::iter::from_fn(|| connect_now(&config.retry.socket).ok()).collect();
        assert!(!full.is_empty());
        let error = ask("GET", "/", TELL, &config).unwrap_err();
        assert_eq!(error.to_string(), "nobody listens at Docker's socket");
    }

    #[test]
    fn each_finds_room_beside_those_ahead_whose_time_has_not_come() {
        let (config, inventory) = (Config::default(), host(vec![device(0)]));
        let waiter = |n: u64, sm: &str, retry: Option<(bool, u64)>| {
            let container = Container { id: format!("c{n}"), ..Container::default() };
            let annotations = [("sublet.sm".to_owned(), sm.to_owned())].into();
            let request = request::parse(&annotations, None, None, &config).unwrap();
            let id = LeaseId::parse(&format!("{n:016x}")).unwrap();
            let mut waiter = Waiter::new(&id, &container, &request, "no room", None);
            waiter.retry = retry.map(|(confirmed, from)| {
                serde_json::from_value(json!({"confirmed": confirmed, "starts": 0, "from": from})).unwrap()
            });
            waiter
        };
        let steps_in = |mut ahead: Ledger, first: Waiter, says: Option<bool>| {
            let second = waiter(2, "60", Some((true, 0)));
            let inventory = Some(inventory.clone());
            let mut kept = Kept { refreshed: Some(Instant::now()), inventory, ..Kept::default() };
            let all = [(first, says), (second, Some(true))];
            let steps = all.into_iter().filter_map(|(one, says)| {
                let step = kept.step(&one, says, &mut ahead, &config)?;
                Some((one.container.id, step))
            });
            steps.collect::<Vec<_>>()
        };
        let steps = |first, says| steps_in(Ledger::empty("boot"), first, says);
        let of = |n: u64, step| (format!("c{n}"), step);
        let none: [(String, Step); 0] = [];
        let (now, later) = (Some((true, 0)), Some((true, u64::MAX)));
        assert_eq!(steps(waiter(1, "60", now), Some(true)), [of(1, Step::Start)]);
        assert_eq!(steps(waiter(1, "60", later), Some(true)), none, "it is not its time");
        assert_eq!(steps(waiter(1, "60", Some((false, 0))), Some(true)), [of(1, Step::Confirm)]);
        assert_eq!(steps(waiter(1, "60", now), None), none, "Docker does not say");
        assert_eq!(steps(waiter(1, "60", None), Some(true)), none, "a process waits");
        assert_eq!(steps(waiter(1, "60", now), Some(false)), [of(1, Step::Forget), of(2, Step::Start)]);
        assert_eq!(steps(waiter(1, "40", now), Some(true)), [of(1, Step::Start), of(2, Step::Start)]);

        let (us, first) = (Process::current().unwrap(), waiter(1, "60", None));
        let leases = vec![Lease { state: LeaseState::Active, ..lease(1, "GPU-0") }];
        let mut held = Ledger { leases, ..Ledger::empty("boot") };
        held.begin_suspending(&first.id, us, Vec::new(), None).unwrap();
        assert!(held.end_suspended(&first.id, us));
        assert_eq!(steps_in(held.clone(), first.clone(), Some(true)), none, "it comes back first");
        held.back_off(&first.id, Duration::from_secs(30), "it is paused");
        assert_eq!(steps_in(held, first, Some(true)), [of(2, Step::Start)]);
    }

    #[test]
    fn the_driver_is_asked_once_in_a_while() {
        let ago = |time| Kept { refreshed: Instant::now().checked_sub(time), ..Kept::default() };
        assert!(Kept::default().may_refresh() && ago(REFRESH).may_refresh());
        assert!(!ago(REFRESH / 2).may_refresh());
    }

    #[test]
    fn each_reason_is_warned_of_once() {
        let mut kept = Kept::default();
        for why in ["a", "b", "a"] {
            kept.warn(&anyhow::anyhow!(why));
        }
        assert_eq!(kept.warned.len(), 2);
    }

    #[test]
    fn an_answer_that_is_none_says_nothing_of_the_container() {
        for answer in [
            "",
            "HTTP/1.0 200 OK\r\n\r\n{",
            "HTTP/1.0 500 No\r\n\r\n{}",
            "\r\n\r\n{}",
            "HTTP/1.0 x\r\n\r\n{}",
        ] {
            assert!(asked(answer, "/shop").is_err(), "{answer}");
        }
    }
}
