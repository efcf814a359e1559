//! Starts refused containers of Docker's again: Docker retries no start that its runtime has refused, whatever the container's
//! restart policy.
//!
//! Who waits is in the ledger, where root's own entry points alone write it when they refuse. That is not enough to start a
//! container: Docker must say of it that its last start failed with the very words of that refusal, and that nobody has
//! touched it since.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use std::{io, thread};

use anyhow::{Context as _, ensure};
use nix::unistd::geteuid;
use serde_json::Value;

use crate::peer::Peer;
use crate::preview::{Whose, preview};
use sublet_core::admit::{AdmitError, Candidate, Local, fresh_inventory, lease_for};
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::grant::Image;
use sublet_core::ledger::{LeaseId, Ledger, Retry, Store, Waiter};
use sublet_core::process::{Process, uptime_seconds};
use sublet_core::text::{first_line, safe_long};

/// The pause between two looks.
const PAUSE: Duration = Duration::from_secs(2);

/// How long Docker may take to tell of a container, and to start one.
const TELL: Duration = Duration::from_secs(5);
const START: Duration = Duration::from_secs(60);

/// The longest answer, in bytes.
const LARGEST: u64 = 1 << 20;

/// Docker's names of containers when they were first asked for. The ledger, which every user may read, has no names.
type Names = BTreeMap<LeaseId, String>;

/// Starts the thread; it ends with the process.
pub(super) fn start(store: Store) -> io::Result<()> {
    let mut names = Names::new();
    let retry = move || {
        loop {
            thread::sleep(PAUSE);
            let looked = look(&store, &mut names);
            let _ = looked.inspect_err(|error| tracing::debug!("refused containers: {error:#}"));
        }
    };
    thread::Builder::new().name("retry".to_owned()).spawn(retry).map(drop)
}

/// Goes through all who wait in order. Who finds room has it, before those behind; of these, the containers of Docker's are
/// started. Where there is none, this reads the ledger alone, if it has changed.
fn look(store: &Store, names: &mut Names) -> anyhow::Result<()> {
    let waiters = store.peek()?.waiters;
    names.retain(|id, _| waiters.iter().any(|waiter| waiter.id == *id));
    if !waiters.iter().any(|waiter| waiter.retry.is_some()) {
        return Ok(());
    }
    let config = &config_files::load()?;
    let local = Local::new(config);
    let mut ahead = local.update(|ledger| ledger.clone())?;
    for waiter in ahead.waiters.clone() {
        let Some(retry) = &waiter.retry else {
            find_room(&waiter, &mut ahead, config);
            continue;
        };
        let note = |step: fn(&mut Retry)| local.update(|ledger| ledger.retry_mut(&waiter.id).map(step));
        let asked = if config.retry.docker { is_as_refused(&waiter, names, config) } else { Ok(false) };
        let is_due = retry.from <= uptime_seconds();
        match asked {
            Ok(true) if !retry.confirmed => drop(note(|retry| retry.confirmed = true)?),
            Ok(true) if is_due && find_room(&waiter, &mut ahead, config).is_some() => {
                // Its entry goes when it gets its lease; if it is refused again, it keeps its place.
                note(Retry::note_start)?;
                let id = &waiter.container.id;
                let (status, why) = ask("POST", &format!("/containers/{id}/start"), START, config)?;
                tracing::info!("container {id} is started: Docker says {status} {}", safe_long(&why, 1000));
            }
            Ok(true) => {}
            // One that was refused anew meanwhile is another.
            Ok(false) => local.update(|ledger| ledger.waiters.retain(|other| *other != waiter))?,
            Err(error) => tracing::debug!("container {}: {error:#}", waiter.container.id),
        }
    }
    Ok(())
}

/// Whether there is room for what `waiter` waits for, which is then booked in the ledger `ahead`. That is not written.
fn find_room(waiter: &Waiter, ahead: &mut Ledger, config: &Config) -> Option<()> {
    let (request, mut inventory) = (waiter.request()?, fresh_inventory(config).ok()?);
    let placement = match preview(&request, &waiter.id, (&mut inventory, ahead, false), Whose::Root, config) {
        // An instance is created when it starts.
        Err(AdmitError::WouldMake { .. }) => return Some(()),
        placed => placed.ok()?,
    };
    let owner = Process { pid: 0, start_time: 0 };
    let candidate = Candidate { container: waiter.container.clone(), owner, engine: None };
    ahead.leases.push(lease_for(&candidate, &placement, &Image::default(), waiter.id.clone(), config));
    Some(())
}

/// Whether Docker is to restart the container of `waiter`, and the last that happened to it is the refusal.
///
/// # Errors
/// Docker does not say.
fn is_as_refused(waiter: &Waiter, names: &mut Names, config: &Config) -> anyhow::Result<bool> {
    let id = &waiter.container.id;
    let (status, told) = ask("GET", &format!("/containers/{id}/json"), TELL, config)?;
    ensure!([200, 404].contains(&status), "Docker answers {status}");
    let told: Value = serde_json::from_str(&told).context("Docker's answer")?;
    let text = |pointer| told.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let name = names.entry(waiter.id.clone()).or_insert_with(|| text("/Name").to_owned());
    // One that ran before has "exited". A start that succeeds takes the error away.
    Ok((text("/Id"), text("/Name")) == (id, name)
        && ["always", "unless-stopped"].contains(&text("/HostConfig/RestartPolicy/Name"))
        && ["created", "exited"].contains(&text("/State/Status"))
        // Behind its first line, what Docker was told names containers.
        && text("/State/Error").contains(first_line(&waiter.why)))
}

/// Asks dockerd of root, which has `limit` for each part of its answer. Returns the status and the body.
fn ask(method: &str, path: &str, limit: Duration, config: &Config) -> anyhow::Result<(u16, String)> {
    let mut stream = UnixStream::connect(&config.retry.socket).context("Docker's socket")?;
    ensure!(Peer::of(&stream)?.uid == geteuid().as_raw(), "who listens at Docker's socket is not root");
    stream.set_write_timeout(Some(limit))?;
    stream.set_read_timeout(Some(limit))?;
    // By HTTP/1.0 the answer comes in one piece, and the connection ends with it.
    let request = format!("{method} {path} HTTP/1.0\r\nHost: docker\r\nContent-Length: 0\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.take(LARGEST).read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("Docker's answer is cut off")?;
    let status = head.split(' ').nth(1).context("Docker's answer has no status")?;
    Ok((status.parse()?, body.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use serde_json::json;
    use sublet_core::ledger::Container;
    use sublet_core::request;

    use super::*;

    /// What a dockerd that answers `answer` says of a container that waits because of `no room; why: it is full`.
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

    fn told(change: impl Fn(&mut Value)) -> String {
        let mut told = json!({"Id": "web", "Name": "/shop", "HostConfig": {"RestartPolicy": {"Name": "always"}},
            "State": {"Status": "created", "Error": "failed to create task: container web: no room\nwhy: it is full: unknown"}});
        change(&mut told);
        format!("HTTP/1.0 200 OK\r\nServer: Docker\r\n\r\n{told}")
    }

    #[test]
    fn a_container_that_is_not_as_the_refusal_left_it_is_not_started() {
        assert!(asked(&told(|_| ()), "/shop").unwrap());
        assert!(asked(&told(|told| told["State"]["Status"] = json!("exited")), "/shop").unwrap());
        assert!(!asked(&told(|_| ()), "/other").unwrap(), "it was renamed");
        let changes: [fn(&mut Value); 6] = [
            |told| told["HostConfig"]["RestartPolicy"]["Name"] = json!("no"),
            |told| told["HostConfig"]["RestartPolicy"]["Name"] = json!("on-failure"),
            |told| told["State"]["Status"] = json!("running"),
            |told| told["State"]["Error"] = json!(""),
            |told| told["State"]["Error"] = json!("port is already allocated"),
            |told| told["Id"] = json!("webster"),
        ];
        for change in changes {
            assert!(!asked(&told(change), "/shop").unwrap(), "{}", told(change));
        }
        let gone = "HTTP/1.0 404 Not Found\r\n\r\n{\"message\":\"No such container: web\"}";
        assert!(!asked(gone, "/shop").unwrap(), "it was removed");
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
