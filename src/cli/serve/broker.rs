//! Answers one request of one client. This may be slow, but it waits neither for a client nor for a container.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{bail, ensure};
use nix::unistd::geteuid;
use serde::Deserialize;
use serde_json::json;

use super::policy_limits::PolicyLimit;
use super::protocol::{self, Admit, Answer, Ask, ContainerNames, Refused};
use super::{retry, room};
use crate::accounting::Wanted;
use crate::known_faults::KnownFaults;
use crate::names;
use crate::peer::{Foreign, OWNS, Peer, Pinned};
use crate::policy_rule::rule_of;
use crate::preview::find_room;
use crate::suspend::{self, Done, SuspendError};
use sublet_core::admit::dynamic_mig::order_instance;
use sublet_core::admit::take_lease::allowed_inventory;
use sublet_core::admit::{self, AdmitError, Asks, Candidate, JobError, Local, PutOff, asks_for_job_share};
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::inventory::Inventory;
use sublet_core::ledger::{Container, DaemonKey, LeaseId, Ledger, LedgerError, Store, Waiter};
use sublet_core::mps;
use sublet_core::place::meant;
use sublet_core::process::epoch_seconds;
use sublet_core::request::{self, Request};
use sublet_core::slurm::{JobCgroup, JobRecord};
use sublet_core::text::safe;

/// The longest container id (runc: 1024) and path (`PATH_MAX`), in bytes, and the most mount points of one image.
const LONGEST_ID: usize = 1024;
const LONGEST_PATH: usize = 4096;
const MOST_MOUNT_POINTS: usize = 512;

/// How long a `sublet wait` keeps its place without asking again. It asks every ten seconds.
const KEPT: Duration = Duration::from_secs(120);

/// The answer to one line from `peer`, as a line. With `put_off`, MIG instances are neither created nor destroyed; it
/// then says what has to be done.
pub(super) fn answer(line: &[u8], peer: Peer, put_off: Option<&Cell<PutOff>>) -> Vec<u8> {
    let asked = protocol::parse::<Ask>(line).map_err(Into::into);
    let answer = asked.and_then(|ask| carry_out(&ask, peer, put_off)).unwrap_or_else(|error| no(&error));
    // A refusal is plain text and always fits into JSON.
    protocol::line(&answer).or_else(|error| protocol::line(&no(&error.into()))).unwrap_or_default()
}

/// Whether this line asks for a report. Nothing else of it is taken apart: this is done on the thread that serves all clients.
pub(super) fn is_report(line: &[u8]) -> bool {
    serde_json::from_slice::<Verb>(line).is_ok_and(|ask| ask.verb == "report")
}

#[derive(Deserialize)]
struct Verb {
    #[serde(rename = "do")]
    verb: String,
}

/// Steps that could not be put right.
pub(super) static STUCK: KnownFaults = KnownFaults::none();

/// Destroys the MIG instances that no lease needs any more, puts right what was cut short of suspensions, and takes a step for
/// those who wait for room. `left` says whether there may be more to do.
pub(super) fn clear(left: &Cell<PutOff>) {
    let clear = || -> anyhow::Result<()> {
        let config = config_files::load()?;
        Local::new(&config).destroy_unneeded(&Store::open(&config.state_dir)?);
        if let Some(stuck) = suspend::put_right(&config, |_| ()) {
            STUCK.warn(stuck, "no step of a suspension is stuck any more");
        }
        if room::take_step(&config)? {
            left.set(PutOff { clear: true, ..left.get() });
        }
        Ok(())
    };
    let _ = clear().inspect_err(|error| tracing::warn!("{error}"));
}

/// An answer that refuses: the reason in one line, and whether waiting may help.
pub(super) fn no(error: &anyhow::Error) -> Answer {
    let refused = error.downcast_ref::<AdmitError>();
    let candidates = refused.map(|refused| refused.candidates().to_vec()).unwrap_or_default();
    let suspension = error.downcast_ref().is_some_and(SuspendError::is_temporary);
    let temporary = suspension || refused.is_some_and(AdmitError::is_temporary);
    Answer::Refused(Refused { reason: error.to_string(), temporary, candidates })
}

/// The configuration is read for each ask, so that a policy takes effect when it is written.
fn carry_out(ask: &Ask, peer: Peer, put_off: Option<&Cell<PutOff>>) -> anyhow::Result<Answer> {
    let config = &config_files::load()?;
    let state = put_off.map_or_else(|| Local::new(config), |put_off| Local::putting_off(config, put_off));
    let pinned = |pid| Pinned::of(pid, peer.uid);
    let client = Client { peer, config };
    // Requests without an answer of their own get `Done`.
    match ask {
        Ask::Inventory => {
            // A user who may not have shares must not cause the driver to be read.
            if client.job()?.is_none() {
                client.limit()?;
            }
            return Ok(Answer::Inventory(Box::new(admit::fresh_inventory(config)?)));
        }
        Ask::Admit(request) => return client.admit(request, state, put_off),
        Ask::Wait { annotations } => return Ok(Answer::Lease(client.wait(annotations, state)?)),
        Ask::Bind { lease, container, pid } => {
            client.own(lease)?;
            check_names(container)?;
            let init = pinned(*pid)
                .map_err(|error| AdmitError::Unbound { lease: lease.clone(), why: error.to_string() })?;
            state.bind_for(lease, container, init.process, peer.pid)?;
        }
        Ask::HandOver { lease, owner } => {
            client.own(lease)?;
            state.hand_over(lease, pinned(*owner)?.process)?;
        }
        Ask::Abandon { id, owner } => state.abandon(peer.uid, id, pinned(*owner)?.process)?,
        Ask::Ending { id, record } => {
            let deletes = Some(pinned(peer.pid)?.process);
            return Ok(Answer::Lease(state.mark_ending(peer.uid, id, record, deletes)?));
        }
        Ask::Unmark { lease } => {
            client.own(lease)?;
            state.unmark(lease)?;
        }
        Ask::End { lease } => return Ok(Answer::Freed(state.end_for(peer.uid, lease, OWNS)?)),
        Ask::Withdraw { lease } => return Ok(Answer::Freed(state.free_for(peer.uid, lease)?)),
        Ask::Enter { id, record } => return Ok(Answer::Done(state.enter_for(peer.uid, id, record)?)),
        Ask::Refused { id, reason, candidates, started } => {
            admit::record_reported(peer.uid, id, reason, candidates, *started, config);
        }
        Ask::Suspend { .. } | Ask::Resume { .. } | Ask::Move { .. } => {
            client.check_may_suspend(ask)?;
            if leave_to_slow(put_off) {
                return Ok(Answer::Done(false));
            }
            let Done { bytes, took } = match ask {
                Ask::Resume { lease, gpu } => suspend::resume(lease, gpu.as_deref(), config)?,
                Ask::Suspend { lease, .. } => suspend::suspend(lease, false, config)?,
                Ask::Move { lease, gpu } => suspend::move_to(lease, gpu, config)?,
                _ => bail!("no such request"),
            };
            let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            return Ok(Answer::Stepped { bytes, took_ms });
        }
        Ask::MakeRoom { waiter } => {
            ensure!(
                peer.uid == geteuid().as_raw(),
                "sublet serve makes room for root's starts when they ask"
            );
            if leave_to_slow(put_off) {
                return Ok(Answer::Done(false));
            }
            room::make_room(waiter, peer.uid, config)?;
        }
        Ask::StartDaemon { key } => return client.start_daemon(key),
        Ask::Job => {
            let cgroup = client.job()?.ok_or_else(|| AdmitError::from(JobError::NotInJob))?;
            let process = pinned(peer.pid)?.process;
            return Ok(Answer::Job(state.job_environment(&cgroup, process, peer.uid)?));
        }
        Ask::Status => return client.status(),
        Ask::Report { wanted } => {
            let report = Wanted::deserialize(wanted)?.report(Some(peer.uid), config);
            return Ok(Answer::Status(serde_json::to_value(report)?));
        }
    }
    Ok(Answer::Done(true))
}

/// Whether the thread for slow work answers in place of this one.
fn leave_to_slow(put_off: Option<&Cell<PutOff>>) -> bool {
    put_off.map(|cell| cell.set(PutOff { make: true, ..cell.get() })).is_some()
}

/// Who asks, by the configuration of now.
struct Client<'a> {
    peer: Peer,
    config: &'a Config,
}

impl<'a> Client<'a> {
    /// The policy limit; `None` for root, who has none.
    fn limit(&self) -> anyhow::Result<Option<PolicyLimit<'a>>> {
        if self.peer.uid == 0 {
            return Ok(None);
        }
        let rule = rule_of(self.peer.uid, self.config).map_err(anyhow::Error::msg)?;
        Ok(Some(PolicyLimit { uid: self.peer.uid, rule }))
    }

    /// The job of Slurm's in which the client runs, if this node bounds jobs.
    fn job(&self) -> anyhow::Result<Option<JobCgroup>> {
        let Peer { pid, uid } = self.peer;
        if uid == 0 || !JobRecord::are_kept(&self.config.state_dir) {
            return Ok(None);
        }
        let pinned = Pinned::of(pid, uid)?;
        let cgroup = JobCgroup::of(pid).map_err(|error| AdmitError::from(JobError::Cgroup(error)))?;
        // The cgroup belongs to the peer only if it has not ended since.
        ensure!(pinned.process.is_alive(), Foreign::Gone(pid));
        Ok(cgroup)
    }

    fn admit(
        &self,
        request: &Admit,
        state: Local<'_>,
        put_off: Option<&Cell<PutOff>>,
    ) -> anyhow::Result<Answer> {
        check(request)?;
        let job = self.job()?;
        if job.is_none() && asks_for_job_share(&request.annotations, request.share.as_deref()) {
            bail!(AdmitError::from(JobError::NotInJob));
        }
        let Peer { pid, uid } = self.peer;
        let wanted = self.request(&request.annotations, request.share.as_deref())?;
        let asker = Pinned::of(pid, uid)?.process;
        let owner = Pinned::of(request.owner.unwrap_or(pid), uid)?.process;
        let ContainerNames { id, bundle, rootfs, record } = request.container.clone();
        let container = Container { uid, id, bundle, rootfs, record };
        let candidate = Candidate { container, rootfs: None, owner, engine: None };
        if let Some(cgroup) = job {
            return Ok(state.admit_in_job(&candidate, request, &cgroup)?);
        }
        let limit = self.limit()?;
        let refused = match state.admit_for(&candidate, request, asker, limit) {
            Err(refused @ AdmitError::Refused(_)) if refused.is_temporary() => refused,
            admitted => return Ok(admitted?),
        };
        let id = LeaseId::random().map_err(AdmitError::Random)?;
        let mut waiter = Waiter::new(&id, &candidate.container, &wanted, &refused.to_string(), Some(asker));
        waiter.rule = limit.map(|limit| limit.rule.clone());
        waiter.stay_for(self.config.suspend.limit);
        if !room::may_find_room(&waiter, self.config) {
            return Err(refused.into());
        }
        if leave_to_slow(put_off) {
            return Ok(Answer::Done(false));
        }
        // One that waits has its entry already, with another id.
        let Some(id) = enter_order(waiter, state)? else { return Err(refused.into()) };
        let admitted = match room::make_room(&id, uid, self.config) {
            Ok(()) => state.admit_for(&candidate, request, asker, limit),
            Err(why) => Err(refused.without_room(&why.to_string())),
        };
        if wanted.wait.is_zero() {
            state.update(|ledger| ledger.waiters.retain(|one| one.id != id))?;
        }
        Ok(admitted?)
    }

    fn request(
        &self,
        annotations: &BTreeMap<String, String>,
        share: Option<&str>,
    ) -> anyhow::Result<Request> {
        let request = request::parse(annotations, share, None, self.config).map_err(AdmitError::from)?;
        // Whom a user's container is for, the kernel says.
        if let Some(other) = &request.owner {
            let user = safe(&names::user(self.peer.uid));
            ensure!(
                *other == user,
                "sublet.owner={other} is not {user}, whose container it is; fix: leave sublet.owner out"
            );
        }
        Ok(request)
    }

    /// The entry of the client's process among those who wait, which is kept for a while from now on. `None`: there is room now, or
    /// no place in the order.
    fn wait(
        &self,
        annotations: &BTreeMap<String, String>,
        state: Local<'_>,
    ) -> anyhow::Result<Option<LeaseId>> {
        // Root writes its entry itself; the number of a user's is bounded.
        let Some(limit) = self.limit()? else { return Ok(None) };
        let (Peer { pid, uid }, config) = (self.peer, self.config);
        let request = Request { wait: KEPT, ..self.request(annotations, None)? };
        let asker = Pinned::of(pid, uid)?.process;
        let (id, container) = (LeaseId::random()?, Container { uid, ..Container::default() });
        let seen = || -> anyhow::Result<Ledger> {
            let mut ledger = self.ledger()?.seen_by(uid);
            ledger.waiters.retain(Waiter::is_there);
            Ok(ledger)
        };
        let asks = Asks { id: &id, container: &container, by: Some(asker), request: &request };
        let look = |inventory: &Inventory, ledger: &Ledger| -> Result<(), AdmitError> {
            let allowed = allowed_inventory(Some(limit), inventory, config)?;
            Ok(find_room(asks, Some(limit), (&allowed, inventory), ledger, config)?.map(drop)?)
        };
        let (mut inventory, mut ledger) = (admit::fresh_inventory(config)?, seen()?);
        let mut found = look(&inventory, &ledger);
        // The client cannot ask the driver, and a start of its would. Who waits asks again and again.
        let is_old = epoch_seconds().abs_diff(inventory.probed_at) >= retry::REFRESH.as_secs();
        if found.as_ref().is_err_and(|no| no.wants_refresh() && (is_old || !no.is_temporary())) {
            (inventory, ledger) = (admit::refresh(config)?, seen()?);
            found = look(&inventory, &ledger);
        }
        let Err(refused) = found else { return Ok(None) };
        let allowed = allowed_inventory(Some(limit), &inventory, config)?;
        // Of a MIG instance that would have to be created it is not known here whether it can be by now.
        let ordered = || order_instance(&request, Some(limit), &allowed, &ledger, config);
        let may_be_made = || matches!(ordered(), Some(Ok(order)) if !order.sites.is_empty());
        if !refused.is_temporary() && !may_be_made() {
            return Err(refused.into());
        }
        let mut waiter = Waiter::new(&id, &container, &request, &refused.to_string(), Some(asker));
        waiter.rule = Some(limit.rule.clone());
        Ok(enter_order(waiter, state)?)
    }

    /// Refuses a lease that is not the client's, in the same way as one that does not exist.
    fn own(&self, lease: &LeaseId) -> anyhow::Result<()> {
        let ledger = self.ledger()?;
        let held = ledger.lease(lease);
        let held = held.filter(|lease| lease.brokered && lease.container.uid == self.peer.uid);
        held.map(drop).ok_or_else(|| AdmitError::NoLease(lease.clone()).into())
    }

    /// Whether the client may suspend, resume and move the container that it names, and have the GPU to which it is to go.
    fn check_may_suspend(&self, ask: &Ask) -> anyhow::Result<()> {
        let (lease, gpu) = match ask {
            Ask::Suspend { lease, .. } => (lease, None),
            Ask::Resume { lease, gpu } => (lease, gpu.as_deref()),
            Ask::Move { lease, gpu } => (lease, Some(gpu.as_str())),
            _ => return Ok(()),
        };
        self.own(lease)?;
        let limit = self.limit()?;
        if let Some(gpu) = gpu {
            let inventory = admit::fresh_inventory(self.config)?;
            let named = |among| meant(gpu, among, self.config).map_or(0, |found| found.len());
            let allowed = allowed_inventory(limit, &inventory, self.config)?;
            if named(&allowed) != named(&inventory) {
                bail!("your policy does not allow GPU {}; fix: name another one", safe(gpu));
            }
        }
        if limit.is_some_and(|limit| !limit.rule.suspend) {
            bail!("your policy does not allow it; fix: root sets suspend = true in your [[policy]]");
        }
        if matches!(ask, Ask::Suspend { force: true, .. }) {
            bail!("only root suspends what its share does not allow; fix: leave out --force");
        }
        Ok(())
    }

    fn ledger(&self) -> Result<Ledger, AdmitError> {
        Ok(admit::read(&Store::open(&self.config.state_dir)?)?)
    }

    /// A start that fails is no refusal: a client that is refused tries by itself.
    fn start_daemon(&self, key: &str) -> anyhow::Result<Answer> {
        if self.peer.uid != geteuid().as_raw() {
            bail!("sublet serve starts no MPS daemon for uid {}, only for root", self.peer.uid);
        }
        let started = mps::child_start(&DaemonKey(key.to_owned()), self.config);
        Ok(started.map_or_else(|error| Answer::NotStarted(error.to_string()), Answer::Started))
    }

    /// Whether the client may have a share, and by which policy limit. In a job, what Slurm gave is the limit, and no
    /// policy is needed.
    fn limit_in(&self, job: Option<u64>) -> anyhow::Result<Option<PolicyLimit<'a>>> {
        let Some(job) = job else { return self.limit() };
        let share = admit::job_share(job, self.peer.uid, self.config).map_err(AdmitError::from)?;
        share.map(|_| None).ok_or_else(|| AdmitError::from(JobError::NoGpu(job)).into())
    }

    fn status(&self) -> anyhow::Result<Answer> {
        let ledger = self.ledger()?;
        let uid = self.peer.uid;
        let own: Vec<_> = ledger.leases.iter().filter(|lease| lease.container.uid == uid).collect();
        let job = self.job()?.map(|cgroup| cgroup.job);
        let limit = self.limit_in(job);
        let (limit, refused) = limit.map_or_else(|no| (None, Some(no.to_string())), |limit| (limit, None));
        Ok(Answer::Status(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "uid": uid,
            "job": job,
            "policy": limit.map(|limit| limit.rule),
            "left": limit.map(|limit| limit.left(&ledger)),
            "refused": refused,
            "leases": own,
        })))
    }
}

/// Puts `waiter` into the order of those who wait. The id of its process's entry, which may have one already; `None`: there is no
/// place for it.
fn enter_order(waiter: Waiter, state: Local<'_>) -> Result<Option<LeaseId>, LedgerError> {
    let asker = waiter.process;
    state.update(|ledger| {
        ledger.add_waiter(waiter);
        ledger.waiters.iter().find(|one| one.process == asker).map(|one| one.id.clone())
    })
}

/// Checks that the texts that go into the ledger have a limited length and name what they should.
fn check(request: &Admit) -> anyhow::Result<()> {
    check_names(&request.container)?;
    let image = &request.image;
    let volumes = || image.volumes.iter().chain(&image.tmp_volume);
    let in_volumes = volumes().flat_map(|volume| &volume.files);
    let in_rootfs = || image.created.iter().chain(&image.empty).chain(&image.left_out).chain(&image.useless);
    let sound = in_rootfs().count() + in_volumes.clone().count() + image.volumes.len() <= MOST_MOUNT_POINTS
        && in_rootfs().chain(&image.library_dir).all(|path| is_path(path))
        && volumes().all(|volume| is_path(&volume.directory))
        && in_volumes.clone().all(|path| is_path(&Path::new("/").join(path)));
    ensure!(sound, "a mount point of the image is not a path, or there are too many");
    Ok(())
}

/// Names that are not known yet may be empty.
fn check_names(names: &ContainerNames) -> anyhow::Result<()> {
    let paths = [&names.bundle, &names.rootfs, &names.record];
    let sound = names.id.len() <= LONGEST_ID && paths.into_iter().all(|path| is_path(path));
    ensure!(sound, "the container's id or one of its paths is missing or too long");
    Ok(())
}

fn is_path(path: &Path) -> bool {
    let text = path.as_os_str().as_encoded_bytes();
    text.len() <= LONGEST_PATH && !text.contains(&0) && (path.is_absolute() || text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admit() -> Admit {
        let container = ContainerNames {
            id: "c".into(),
            bundle: "/b".into(),
            rootfs: "/b/rootfs".into(),
            record: "/r/c".into(),
        };
        Admit { container, ..Admit::default() }
    }

    #[test]
    fn a_report_is_known_by_its_verb_alone() {
        let is_report = |line: &str| is_report(line.as_bytes());
        assert!(is_report(r#"{"v":1,"do":"report","wanted":{}}"#));
        assert!(is_report(r#"{"v":1,"do":"report","wanted":[{"of":"any"}],"lease":7}"#));
        assert!(is_report(r#"{"do":"report"}"#), "its answer says what it lacks");
        assert!(!is_report(r#"{"v":1,"do":"status","wanted":"report"}"#) && !is_report("report"));
    }

    #[test]
    fn names_are_bounded_and_paths_are_paths() {
        assert!(check(&admit()).is_ok());
        let broken: [fn(&mut Admit); 6] = [
            |request| request.container.id = "x".repeat(1025),
            |request| request.container.bundle = "relative".into(),
            |request| request.container.rootfs = format!("/{}", "x".repeat(4096)).into(),
            |request| request.container.record = "/a\0b".into(),
            |request| request.image.created = vec!["/x".into(); 513],
            |request| request.image.library_dir = Some("../lib".into()),
        ];
        for (number, breaks) in broken.into_iter().enumerate() {
            let mut request = admit();
            breaks(&mut request);
            assert!(check(&request).is_err(), "case {number}");
        }
    }

    #[test]
    fn a_report_has_a_thread_of_its_own_and_who_may_not_ask_for_room_is_left_to_none() {
        let report = protocol::line(&Ask::Report { wanted: json!({}) }).unwrap();
        let room = Ask::MakeRoom { waiter: LeaseId::random().unwrap() };
        let (room, put_off) = (protocol::line(&room).unwrap(), Cell::default());
        assert_eq!([is_report(&report), is_report(&room)], [true, false]);
        answer(&room, Peer { pid: 1, uid: 4_000_000_000 }, Some(&put_off));
        assert!(!put_off.get().make);
    }

    #[test]
    fn whatever_is_no_ask_is_answered_with_a_line() {
        let peer = Peer { pid: 1, uid: 4_000_000_000 };
        let answer = String::from_utf8(answer(b"\x00\x1b[2J", peer, None)).unwrap();
        assert_eq!(
            answer,
            "{\"v\":1,\"refused\":{\"reason\":\"the request cannot be parsed: expected value at line 1 \
             column 1\",\"temporary\":false}}\n"
        );
    }
}
