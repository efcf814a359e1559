//! Admission for users without root: `sublet serve` does what needs the state.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use serde_json::Value;

use super::{Admission, AdmitError, Candidate, EMPTY_CGROUP, is_of_bundle, undo, wish};
use crate::apply;
use crate::broker::client::{Broker, BrokerError};
use crate::broker::protocol::{Admit, Answer, Ask, ContainerNames};
use crate::config::Config;
use crate::grant::Image;
use crate::inventory::Inventory;
use crate::ledger::{Binding, LEASE_ANNOTATION, Lease, LeaseId};
use crate::mps;
use crate::process::Process;
use crate::request::Request;

/// Between two looks for a free share.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Between two looks whether a container's processes are gone.
const STILL_THERE: Duration = Duration::from_millis(20);

/// Whether the state is not ours to change: root of the first user namespace may, and whoever the state
/// directory belongs to (tests; root in a system container). Under rootless engines we seem to be root
/// and see what is really root's as the overflow uid's.
#[must_use]
pub fn applies(config: &Config) -> bool {
    let us = geteuid();
    if us.is_root() && !apply::in_user_namespace() {
        return false;
    }
    // One that is not there yet would have to be made by whoever owns what it is made in.
    let owner = config.state_dir.ancestors().find_map(|dir| dir.symlink_metadata().ok());
    owner.is_none_or(|dir| dir.uid() != us.as_raw())
}

/// As [`super::admit`], for a container that asks for a share.
pub(super) fn admit(
    candidate: &Candidate<'_>,
    annotations: &BTreeMap<String, String>,
    spec: &mut Value,
    config: &Config,
) -> Result<Admission, AdmitError> {
    let mut broker = Broker::new(config);
    let mut annotations = annotations.clone();
    // First of all: the nodes that another entry point has put there are bind mounts, like those of somebody's own.
    if annotations.contains_key(LEASE_ANNOTATION) {
        match granted_before(candidate, &annotations, spec, &mut broker) {
            // The lease of an earlier run of this bundle is none any more.
            Err(AdmitError::Broker(_)) if is_of_earlier_run(&annotations, spec, candidate) => undo(spec)?,
            done => return done,
        }
        annotations.remove(LEASE_ANNOTATION);
    }
    // Looked at here as well as there: the first has the spec, the last has the say.
    let request = wish(spec, candidate.share, config)?;
    let deadline = Instant::now() + request.wait;
    loop {
        candidate.check_wanted()?;
        let error = match look(candidate, &annotations, &request, spec, &mut broker, config) {
            Err(error) if error.is_temporary() && Instant::now() < deadline => error,
            done => return done,
        };
        tracing::debug!("looking again: {error}");
        candidate.wait(LOOK_AGAIN.min(deadline.saturating_duration_since(Instant::now())));
    }
}

/// A spec that carries a lease: the service knows whether it is this container's.
fn granted_before(
    candidate: &Candidate<'_>,
    annotations: &BTreeMap<String, String>,
    spec: &Value,
    broker: &mut Broker,
) -> Result<Admission, AdmitError> {
    match broker.ask(&ask(candidate, annotations, spec, Image::default()))? {
        Answer::AlreadyGranted(lease) => Ok(Admission::AlreadyGranted(lease)),
        _ => unfitting(),
    }
}

fn is_of_earlier_run(
    annotations: &BTreeMap<String, String>,
    spec: &Value,
    candidate: &Candidate<'_>,
) -> bool {
    annotations.get(LEASE_ANNOTATION).is_some_and(|id| is_of_bundle(id, spec, &candidate.container))
}

fn look(
    candidate: &Candidate<'_>,
    annotations: &BTreeMap<String, String>,
    request: &Request,
    spec: &mut Value,
    broker: &mut Broker,
    config: &Config,
) -> Result<Admission, AdmitError> {
    let Answer::Inventory(inventory) = broker.ask(&Ask::Inventory)? else { return unfitting() };
    let image = apply::inspect(spec, &candidate.container.rootfs, request, &inventory, config)?;
    let Answer::Granted(granted) = broker.ask(&ask(candidate, annotations, spec, image))? else {
        return unfitting();
    };
    if let Err(error) = apply::edit(spec, &granted.grant) {
        let _ = broker.ask(&Ask::Withdraw { lease: granted.lease });
        return Err(error.into());
    }
    Ok(Admission::Granted { lease: granted.lease, warnings: granted.warnings })
}

fn ask(candidate: &Candidate<'_>, annotations: &BTreeMap<String, String>, spec: &Value, image: Image) -> Ask {
    let container = &candidate.container;
    // What we wrote for ourselves is long, and nobody asks for it there.
    let told = |key: &str| key.starts_with("sublet.") && !key.starts_with("sublet.lease.");
    let ours = annotations.iter().filter(|(key, _)| told(key));
    let us = std::process::id();
    Ask::Admit(Box::new(Admit {
        container: ContainerNames {
            id: container.id.clone(),
            bundle: container.bundle.clone(),
            rootfs: container.rootfs.clone(),
            record: container.record.clone(),
        },
        owner: Some(candidate.owner.pid).filter(|owner| u32::try_from(*owner) != Ok(us)),
        share: candidate.share.map(str::to_owned),
        annotations: ours.map(|(key, value)| (key.clone(), value.clone())).collect(),
        capabilities: apply::environment_value(spec, "NVIDIA_DRIVER_CAPABILITIES"),
        image,
    }))
}

fn unfitting<T>() -> Result<T, AdmitError> {
    Err(BrokerError::Unfitting.into())
}

/// As [`super::withdraw`].
pub(super) fn withdraw(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    freed(&Ask::Withdraw { lease: lease.clone() }, config)
}

/// As [`super::end`]: what the service does not wait for is waited for here.
pub(super) fn end(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    let deadline = Instant::now() + EMPTY_CGROUP;
    loop {
        match freed(&Ask::End { lease: lease.clone() }, config) {
            Err(error) if error.is_temporary() && Instant::now() < deadline => {
                std::thread::sleep(STILL_THERE);
            }
            done => return done,
        }
    }
}

/// The mount points in the root filesystem are ours to remove: root would not touch where a user points.
fn freed(ask: &Ask, config: &Config) -> Result<(), AdmitError> {
    let Answer::Freed(left) = Broker::new(config).ask(ask)? else { return unfitting() };
    if let Some(left) = left {
        crate::replace::sweep(&left.bundle);
        apply::clear(&left);
    }
    Ok(())
}

/// The same where whoever looked first has freed the lease: what a container leaves it remembers itself.
pub(super) fn clear_after(lease: &Lease, config: &Config) {
    let rootfs = &lease.container.rootfs;
    // A container of the same image's directory may hold a share; where no path is, nothing is in the way.
    let in_use = rootfs.to_str().is_none_or(|rootfs| is_mentioned(rootfs, config));
    if !in_use {
        apply::cleanup_mount_points(rootfs, &lease.mount_points);
    }
    super::bind::clear_volumes(lease, config);
}

/// As [`super::bind`].
pub(super) fn bind(lease: &LeaseId, binding: &Binding, config: &Config) -> Result<(), AdmitError> {
    let container = ContainerNames {
        id: binding.id.clone(),
        bundle: binding.bundle.clone(),
        record: binding.record.clone(),
        ..ContainerNames::default()
    };
    done(&Ask::Bind { lease: lease.clone(), container, pid: binding.init.process.pid }, config)
}

/// As [`super::hand_over`].
pub(super) fn hand_over(lease: &LeaseId, owner: Process, config: &Config) -> Result<(), AdmitError> {
    done(&Ask::HandOver { lease: lease.clone(), owner: owner.pid }, config)
}

/// As [`super::abandon`].
pub(super) fn abandon(id: &str, owner: Process, config: &Config) -> Result<(), AdmitError> {
    if !may_have_lease(id, config) {
        return Ok(());
    }
    done(&Ask::Abandon { id: id.to_owned(), owner: owner.pid }, config)
}

/// Tells the service of a refusal, for `sublet status --last-error`, unless its own silence was the reason.
pub(super) fn refused(container_id: &str, error: &AdmitError, config: &Config) {
    let silent = |broker: &BrokerError| !matches!(broker, BrokerError::Refused { .. } | BrokerError::TooLong);
    if matches!(error, AdmitError::Broker(broker) if silent(broker)) {
        return;
    }
    let ask = Ask::Refused { id: container_id.to_owned(), reason: error.to_string() };
    if let Err(error) = done(&ask, config) {
        tracing::debug!("the refusal could not be recorded: {error}");
    }
}

/// As [`super::fresh_inventory`].
pub(super) fn inventory(config: &Config) -> Result<Inventory, AdmitError> {
    match Broker::new(config).ask(&Ask::Inventory)? {
        Answer::Inventory(inventory) => Ok(*inventory),
        _ => unfitting(),
    }
}

/// What the service says of us: our leases, our policy and what it leaves.
///
/// # Errors
/// It does not run.
pub fn own_status(config: &Config) -> Result<Value, AdmitError> {
    match Broker::new(config).ask(&Ask::Status)? {
        Answer::Status(status) => Ok(status),
        _ => unfitting(),
    }
}

fn done(ask: &Ask, config: &Config) -> Result<(), AdmitError> {
    match Broker::new(config).ask(ask)? {
        Answer::Done(_) => Ok(()),
        _ => unfitting(),
    }
}

/// As [`super::mark_ending`].
pub(super) fn mark_ending(id: &str, record: &Path, config: &Config) -> Result<Option<LeaseId>, AdmitError> {
    let ask = Ask::Ending { id: id.to_owned(), record: record.to_owned() };
    let lease = match may_have_lease(id, config).then(|| Broker::new(config).ask(&ask)).transpose()? {
        Some(Answer::Lease(lease)) => lease,
        Some(_) => return unfitting(),
        None => None,
    };
    if let (None, Some(ended)) = (&lease, Lease::of_ended(record)) {
        clear_after(&ended, config);
    }
    Ok(lease)
}

/// As [`super::unmark`].
pub(super) fn unmark(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    done(&Ask::Unmark { lease: lease.clone() }, config)
}

/// As [`super::enter`]: the service brings a daemon back. Where it is not there itself, a daemon that answers needs
/// nobody to do that.
pub(super) fn enter(public: &Path, id: &str, record: &Path, config: &Config) -> Result<(), AdmitError> {
    let ask = Ask::Enter { id: id.to_owned(), record: record.to_owned() };
    let missing = match Broker::new(config).ask(&ask) {
        Ok(Answer::Done(true)) => return Ok(()),
        Ok(Answer::Done(false)) => None,
        Ok(_) => return unfitting(),
        Err(refused @ BrokerError::Refused { .. }) => return Err(refused.into()),
        Err(error) => Some(error),
    };
    match (mps::answers(public, config)?, missing) {
        (true, _) => Ok(()),
        (false, Some(error)) => Err(error.into()),
        (false, None) => Err(AdmitError::NotHeld),
    }
}

/// Whether the ledger, which everybody may read, mentions the container at all: those that are not ours
/// must not depend on the service. A hint only; the service decides.
fn may_have_lease(id: &str, config: &Config) -> bool {
    !id.is_empty() && is_mentioned(id, config)
}

/// What cannot be read may mention it.
fn is_mentioned(text: &str, config: &Config) -> bool {
    if !crate::ledger::is_there(&config.state_dir) {
        return false;
    }
    let ledger = crate::ledger::written(&config.state_dir);
    ledger.is_empty() || ledger.windows(text.len().max(1)).any(|window| window == text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(dir: &Path) -> Config {
        Config { state_dir: dir.to_owned(), ..Config::default() }
    }

    #[test]
    fn state_of_our_own_is_ours_to_change() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!applies(&config(dir.path())));
        assert!(!applies(&config(&dir.path().join("not/yet"))));
    }

    #[test]
    fn containers_that_the_ledger_does_not_mention_need_no_service() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        assert_eq!(mark_ending("c1", Path::new("/r/c1"), &config).unwrap(), None);
        std::fs::write(dir.path().join("ledger.json"), r#"{"leases":[{"id":"c1"}]}"#).unwrap();
        assert_eq!(mark_ending("c2", Path::new("/r/c2"), &config).unwrap(), None);
        let error = mark_ending("c1", Path::new("/r/c1"), &config).unwrap_err();
        assert!(error.to_string().starts_with("sublet serve is not running"), "{error}");
    }
}
