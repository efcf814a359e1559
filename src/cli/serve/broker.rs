//! Answers one request of one client. This may be slow, but it waits neither for a client nor for a container.

use std::cell::Cell;
use std::path::Path;

use nix::unistd::geteuid;
use serde_json::json;

use super::policy_limits::PolicyLimit;
use super::policy_of_user::rule_of;
use super::protocol::{self, Admit, Answer, Ask, ContainerNames, Refused};
use crate::peer::{OWNS, Peer, Pinned};
use sublet_core::admit::{self, AdmitError, Candidate, JobError, Local, PutOff, asks_for_job_share};
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::ledger::{Container, DaemonKey, LeaseId, Store};
use sublet_core::mps;
use sublet_core::process::Process;
use sublet_core::slurm::{JobCgroup, JobRecord};

/// The longest container id (runc: 1024) and path (`PATH_MAX`), in bytes, and the most mount points of one image.
const LONGEST_ID: usize = 1024;
const LONGEST_PATH: usize = 4096;
const MOST_MOUNT_POINTS: usize = 512;

/// The answer to one line from `peer`, as a line. With `put_off`, MIG instances are neither created nor destroyed; it
/// then says what has to be done.
pub(super) fn answer(line: &[u8], peer: Peer, put_off: Option<&Cell<PutOff>>) -> Vec<u8> {
    let answer = match protocol::parse::<Ask>(line) {
        Ok(ask) => carry_out(&ask, peer, put_off).unwrap_or_else(no),
        Err(error) => no(error.to_string()),
    };
    let unwritable = |error: protocol::ProtocolError| protocol::line(&no(error.to_string()));
    // A refusal is plain text and always fits into JSON.
    protocol::line(&answer).or_else(unwritable).unwrap_or_default()
}

/// Destroys the MIG instances that no lease needs any more.
pub(super) fn clear() {
    let cleared = config_files::load().map_err(|error| error.to_string()).and_then(|config| {
        let store = Store::open(&config.state_dir).map_err(|error| error.to_string())?;
        Local::new(&config).destroy_unneeded(&store);
        Ok(())
    });
    if let Err(error) = cleared {
        tracing::warn!("{error}");
    }
}

/// An answer that refuses.
pub(super) fn no(refusal: impl Into<No>) -> Answer {
    let No { reason, temporary } = refusal.into();
    Answer::Refused(Refused { reason, temporary })
}

/// The reason in one line, and whether waiting may help.
pub(super) struct No {
    reason: String,
    temporary: bool,
}

impl From<String> for No {
    fn from(reason: String) -> Self {
        Self { reason, temporary: false }
    }
}

impl From<AdmitError> for No {
    fn from(error: AdmitError) -> Self {
        Self { reason: error.to_string(), temporary: error.is_temporary() }
    }
}

impl From<crate::peer::Foreign> for No {
    fn from(error: crate::peer::Foreign) -> Self {
        error.to_string().into()
    }
}

/// The configuration is read for each ask, so that a policy takes effect when it is written.
fn carry_out(ask: &Ask, peer: Peer, put_off: Option<&Cell<PutOff>>) -> Result<Answer, No> {
    let config = config_files::load().map_err(|error| error.to_string())?;
    let state = put_off.map_or_else(|| Local::new(&config), |put_off| Local::putting_off(&config, put_off));
    match ask {
        Ask::Inventory => {
            // A user who may not have shares must not cause the driver to be read.
            if job_of(peer, &config)?.is_none() {
                limit(peer, &config)?;
            }
            Ok(Answer::Inventory(Box::new(admit::fresh_inventory(&config)?)))
        }
        Ask::Admit(told) => admit(told, peer, state, &config),
        Ask::Bind { lease, container, pid } => bind(lease, container, *pid, peer, state, &config),
        Ask::HandOver { lease, owner } => {
            own(lease, peer, &config)?;
            state.hand_over(lease, Pinned::of(*owner, peer.uid)?.process)?;
            Ok(Answer::Done(true))
        }
        Ask::Abandon { id, owner } => {
            state.abandon(peer.uid, id, Pinned::of(*owner, peer.uid)?.process)?;
            Ok(Answer::Done(true))
        }
        Ask::Ending { id, record } => {
            let deleter = Pinned::of(peer.pid, peer.uid)?.process;
            Ok(Answer::Lease(state.mark_ending(peer.uid, id, record, Some(deleter))?))
        }
        Ask::Unmark { lease } => {
            own(lease, peer, &config)?;
            state.unmark(lease)?;
            Ok(Answer::Done(true))
        }
        Ask::End { lease } => Ok(Answer::Freed(state.end_for(peer.uid, lease, OWNS)?)),
        Ask::Withdraw { lease } => Ok(Answer::Freed(state.free_for(peer.uid, lease)?)),
        Ask::Enter { id, record } => Ok(Answer::Done(state.enter_for(peer.uid, id, record)?)),
        Ask::Refused { id, reason } => {
            admit::record_reported(peer.uid, id, reason, &config);
            Ok(Answer::Done(true))
        }
        Ask::StartDaemon { key } => start_daemon(key, peer, &config),
        Ask::Job => job(peer, state, &config),
        Ask::Status => status(peer, &config),
    }
}

/// The policy limit of `peer`; `None` for root, who has none.
fn limit(peer: Peer, config: &Config) -> Result<Option<PolicyLimit<'_>>, No> {
    if peer.uid == 0 {
        return Ok(None);
    }
    Ok(Some(PolicyLimit { uid: peer.uid, rule: rule_of(peer.uid, config)? }))
}

/// The job of Slurm's in which `peer` runs, if this node bounds jobs.
fn job_of(peer: Peer, config: &Config) -> Result<Option<JobCgroup>, No> {
    if peer.uid == 0 || !JobRecord::are_kept(&config.state_dir) {
        return Ok(None);
    }
    let pinned = Pinned::of(peer.pid, peer.uid)?;
    let cgroup = JobCgroup::of(peer.pid).map_err(|error| AdmitError::from(JobError::Cgroup(error)))?;
    // What was read belongs to the peer only if it has not ended since.
    if !pinned.process.is_alive() {
        return Err(crate::peer::Foreign::Gone(peer.pid).into());
    }
    Ok(cgroup)
}

fn job(peer: Peer, state: Local<'_>, config: &Config) -> Result<Answer, No> {
    let cgroup = job_of(peer, config)?.ok_or_else(|| AdmitError::from(JobError::NotInJob))?;
    let process = Pinned::of(peer.pid, peer.uid)?.process;
    Ok(Answer::Job(state.job_environment(&cgroup, process, peer.uid)?))
}

fn admit(told: &Admit, peer: Peer, state: Local<'_>, config: &Config) -> Result<Answer, No> {
    check(told)?;
    let Some(cgroup) = job_of(peer, config)? else {
        if asks_for_job_share(&told.annotations, told.share.as_deref()) {
            return Err(AdmitError::from(JobError::NotInJob).into());
        }
        return Ok(state.admit_for(&candidate(told, peer)?, told, limit(peer, config)?)?);
    };
    Ok(state.admit_in_job(&candidate(told, peer)?, told, &cgroup)?)
}

fn candidate(told: &Admit, peer: Peer) -> Result<Candidate<'static>, No> {
    let owner: Process = Pinned::of(told.owner.unwrap_or(peer.pid), peer.uid)?.process;
    let ContainerNames { id, bundle, rootfs, record } = told.container.clone();
    let container = Container { uid: peer.uid, id, bundle, rootfs, record };
    Ok(Candidate { container, owner, engine: None })
}

/// Checks that the texts that go into the ledger have a limited length and name what they should.
fn check(told: &Admit) -> Result<(), No> {
    check_names(&told.container)?;
    let image = &told.image;
    let volumes = || image.volumes.iter().chain(&image.tmp_volume);
    let in_volumes = volumes().flat_map(|volume| &volume.files);
    let in_rootfs = || image.created.iter().chain(&image.empty).chain(&image.left_out).chain(&image.useless);
    let sound = in_rootfs().count() + in_volumes.clone().count() + image.volumes.len() <= MOST_MOUNT_POINTS
        && in_rootfs().chain(&image.library_dir).all(|path| is_path(path))
        && volumes().all(|volume| is_path(&volume.directory))
        && in_volumes.clone().all(|path| is_path(&Path::new("/").join(path)));
    if sound {
        Ok(())
    } else {
        Err("a mount point of the image is not a path, or there are too many".to_owned().into())
    }
}

/// Names that are not known yet may be empty.
fn check_names(names: &ContainerNames) -> Result<(), No> {
    let paths = [&names.bundle, &names.rootfs, &names.record];
    let sound = names.id.len() <= LONGEST_ID && paths.into_iter().all(|path| is_path(path));
    if sound {
        Ok(())
    } else {
        Err("the container's id or one of its paths is missing or too long".to_owned().into())
    }
}

fn is_path(path: &Path) -> bool {
    let text = path.as_os_str().as_encoded_bytes();
    text.len() <= LONGEST_PATH && !text.contains(&0) && (path.is_absolute() || text.is_empty())
}

fn bind(
    lease: &LeaseId,
    names: &ContainerNames,
    pid: i32,
    peer: Peer,
    state: Local<'_>,
    config: &Config,
) -> Result<Answer, No> {
    own(lease, peer, config)?;
    check_names(names)?;
    let pinned = Pinned::of(pid, peer.uid)
        .map_err(|error| AdmitError::Unbound { lease: lease.clone(), why: error.to_string() })?;
    state.bind_for(lease, names, pinned.process, peer.pid)?;
    Ok(Answer::Done(true))
}

/// Refuses a lease that is not `peer`'s, in the same way as one that does not exist.
fn own(lease: &LeaseId, peer: Peer, config: &Config) -> Result<(), No> {
    let store = Store::open(&config.state_dir).map_err(AdmitError::from)?;
    let ledger = admit::read(&store).map_err(AdmitError::from)?;
    let held = ledger.lease(lease).filter(|lease| lease.brokered && lease.container.uid == peer.uid);
    held.map(drop).ok_or_else(|| AdmitError::NoLease(lease.clone()).into())
}

/// A start that fails is no refusal: a client that is refused tries by itself.
fn start_daemon(key: &str, peer: Peer, config: &Config) -> Result<Answer, No> {
    if peer.uid != geteuid().as_raw() {
        return Err(format!("sublet serve starts no MPS daemon for uid {}, only for root", peer.uid).into());
    }
    let started = mps::child_start(&DaemonKey(key.to_owned()), config);
    Ok(started.map_or_else(|error| Answer::NotStarted(error.to_string()), Answer::Started))
}

fn has_share(job: u64, peer: Peer, config: &Config) -> Result<(), No> {
    let share = admit::job_share(job, peer.uid, config).map_err(AdmitError::from)?;
    share.map(drop).ok_or_else(|| AdmitError::from(JobError::NoGpu(job)).into())
}

fn status(peer: Peer, config: &Config) -> Result<Answer, No> {
    let store = Store::open(&config.state_dir).map_err(AdmitError::from)?;
    let ledger = admit::read(&store).map_err(AdmitError::from)?;
    let own: Vec<_> = ledger.leases.iter().filter(|lease| lease.container.uid == peer.uid).collect();
    let job = job_of(peer, config)?.map(|cgroup| cgroup.job);
    // In a job, what Slurm gave is the limit, and no policy is needed.
    let limit = match job {
        Some(job) => has_share(job, peer, config).map(|()| None),
        None => limit(peer, config),
    };
    let (limit, refused) = limit.map_or_else(|no: No| (None, Some(no.reason)), |limit| (limit, None));
    Ok(Answer::Status(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uid": peer.uid,
        "job": job,
        "policy": limit.map(|limit| limit.rule),
        "left": limit.map(|limit| limit.left(&ledger)),
        "refused": refused,
        "leases": own,
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told() -> Admit {
        let container = ContainerNames {
            id: "c".into(),
            bundle: "/b".into(),
            rootfs: "/b/rootfs".into(),
            record: "/r/c".into(),
        };
        Admit { container, ..Admit::default() }
    }

    #[test]
    fn names_are_bounded_and_paths_are_paths() {
        assert!(check(&told()).is_ok());
        let broken: [fn(&mut Admit); 6] = [
            |told| told.container.id = "x".repeat(1025),
            |told| told.container.bundle = "relative".into(),
            |told| told.container.rootfs = format!("/{}", "x".repeat(4096)).into(),
            |told| told.container.record = "/a\0b".into(),
            |told| told.image.created = vec!["/x".into(); 513],
            |told| told.image.library_dir = Some("../lib".into()),
        ];
        for (number, breaks) in broken.into_iter().enumerate() {
            let mut told = told();
            breaks(&mut told);
            assert!(check(&told).is_err(), "case {number}");
        }
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
