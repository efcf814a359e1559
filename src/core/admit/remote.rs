//! The state of `sublet serve`, for users without root. The service is asked for every change.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::last_refusals::MOST_CANDIDATES;
use super::local::{clear_volumes, may_be_in_use};
use super::request_of_spec::{RequestSource, is_of_bundle, remove_earlier_grant, request_of};
use super::take_lease::retry_pause;
use super::{Admission, AdmitError, Candidate, EMPTY_CGROUP};
use crate::broker::client::{Broker, BrokerError};
use crate::broker::protocol::{Admit, Answer, Ask, ContainerNames};
use crate::config::Config;
use crate::grant::Image;
use crate::inventory::Inventory;
use crate::ledger::{self, Binding, Container, LEASE_ANNOTATION, Lease, LeaseId};
use crate::process::Process;
use crate::request::Request;
use crate::{mps, oci, slurm};

const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// The state of `sublet serve`.
pub(super) struct Remote<'a> {
    pub(super) config: &'a Config,
}

impl Remote<'_> {
    pub(super) fn ask_done(&self, ask: &Ask) -> Result<(), AdmitError> {
        let Answer::Done(_) = Broker::new(self.config).ask(ask)? else { return unexpected() };
        Ok(())
    }

    /// This process removes the mount points in the root filesystem itself. Root removes nothing at a path that a user
    /// names.
    pub(super) fn ask_free(&self, ask: &Ask) -> Result<(), AdmitError> {
        let Answer::Freed(left) = Broker::new(self.config).ask(ask)? else { return unexpected() };
        if let Some(left) = left {
            crate::fs::sweep(&left.bundle);
            // The ledger has no leftovers of users' containers.
            let _ = oci::clear(&left);
        }
        Ok(())
    }

    /// Whether the ledger, which every user may read, mentions the container, or is unreadable: containers without a share
    /// must not depend on the service. This is only a hint. The service decides.
    fn may_have_lease(&self, id: &str) -> bool {
        if id.is_empty() || !ledger::is_there(&self.config.state_dir) {
            return false;
        }
        let ledger = ledger::read_text(&self.config.state_dir);
        ledger.is_empty() || ledger.windows(id.len()).any(|window| window == id.as_bytes())
    }

    pub(super) fn admit(
        &self,
        candidate: &Candidate<'_>,
        source: &RequestSource,
        spec: &mut Value,
    ) -> Result<Admission, AdmitError> {
        let mut broker = Broker::new(self.config);
        let mut source = source.clone();
        // This is checked first: the nodes that another entry point has added are bind mounts, like nodes that the user
        // adds.
        if let Some(id) = source.annotations.get(LEASE_ANNOTATION) {
            let ask = admit_request(candidate, &source, spec, Image::default(), &[]);
            // The service knows whether it belongs to this container.
            let error = match broker.ask(&ask) {
                Ok(Answer::AlreadyGranted(lease)) => return Ok(Admission::AlreadyGranted(lease)),
                Ok(_) => BrokerError::UnexpectedAnswer,
                Err(error) => error,
            };
            if !is_of_bundle(id, spec, &candidate.container) {
                return Err(error.into());
            }
            // The lease of an earlier run of this bundle is no longer valid.
            remove_earlier_grant(spec)?;
            source = source.without_lease();
        }
        // A job without a GPU needs nothing, not even a driver.
        let mut forbidden = Vec::new();
        if source.is_of_job() {
            match broker.ask(&Ask::Job)? {
                Answer::Job(None) => return Ok(Admission::NoShare),
                Answer::Job(Some(given)) => forbidden = slurm::forbidden(&given.gpus),
                _ => return unexpected(),
            }
        }
        // Checked here and in the service: only this process has the spec, but the service decides.
        let request = request_of(&source, spec, self.config)?;
        let began = Instant::now();
        let deadline = began + request.wait;
        loop {
            candidate.check_wanted()?;
            let error =
                match try_admit((candidate, &source, &request), &forbidden, spec, &mut broker, self.config) {
                    Err(error) if error.is_temporary() && Instant::now() < deadline => error,
                    done => return done,
                };
            tracing::debug!("looking again: {error}");
            candidate
                .wait(retry_pause(began.elapsed()).min(deadline.saturating_duration_since(Instant::now())));
        }
    }

    /// The service does not wait for the container's processes to end, so this process does.
    pub(super) fn end(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        let deadline = Instant::now() + EMPTY_CGROUP;
        loop {
            match self.ask_free(&Ask::End { lease: lease.clone() }) {
                Err(error) if error.is_temporary() && Instant::now() < deadline => {
                    std::thread::sleep(RETRY_PAUSE);
                }
                done => return done,
            }
        }
    }

    /// Another command has already freed the lease. The container's annotation has its mount points.
    pub(super) fn clear_after(&self, lease: &Lease) {
        let rootfs = &lease.container.rootfs;
        // Another container with the same root filesystem may hold a share.
        if !may_be_in_use(rootfs, lease, self.config) {
            oci::cleanup_mount_points(rootfs, &lease.mount_points);
        }
        clear_volumes(lease, self.config);
    }

    pub(super) fn abandon(&self, id: &str, owner: Process) -> Result<(), AdmitError> {
        if !self.may_have_lease(id) {
            return Ok(());
        }
        self.ask_done(&Ask::Abandon { id: id.to_owned(), owner: owner.pid })
    }

    pub(super) fn bind(&self, lease: &LeaseId, binding: &Binding) -> Result<(), AdmitError> {
        let Binding { id, bundle, record, init } = binding.clone();
        let container = ContainerNames { id, bundle, record, ..ContainerNames::default() };
        self.ask_done(&Ask::Bind { lease: lease.clone(), container, pid: init.process.pid })
    }

    pub(super) fn mark_ending(&self, id: &str, record: &Path) -> Result<Option<LeaseId>, AdmitError> {
        let ask = Ask::Ending { id: id.to_owned(), record: record.to_owned() };
        let lease = match self.may_have_lease(id).then(|| Broker::new(self.config).ask(&ask)).transpose()? {
            Some(Answer::Lease(lease)) => lease,
            Some(_) => return unexpected(),
            None => None,
        };
        if let (None, Some(ended)) = (&lease, Lease::read_ended(record)) {
            self.clear_after(&ended);
        }
        Ok(lease)
    }

    pub(super) fn new_inventory(&self) -> Result<Inventory, AdmitError> {
        let Answer::Inventory(inventory) = Broker::new(self.config).ask(&Ask::Inventory)? else {
            return unexpected();
        };
        Ok(*inventory)
    }

    /// That the service does not answer is no refusal.
    pub(super) fn record_refusal(&self, container_id: &str, error: &AdmitError) {
        let silent =
            |broker: &BrokerError| !matches!(broker, BrokerError::Refused { .. } | BrokerError::TooLong);
        if matches!(error, AdmitError::Broker(broker) if silent(broker)) {
            return;
        }
        let candidates = error.candidates().iter().take(MOST_CANDIDATES).cloned().collect();
        self.report(container_id, error.to_string(), candidates, false);
    }

    /// Has the service record why a container was refused or, if it `started`, a warning.
    pub(super) fn report(&self, id: &str, reason: String, candidates: Vec<String>, started: bool) {
        if let Err(error) = self.ask_done(&Ask::Refused { id: id.to_owned(), reason, candidates, started }) {
            tracing::debug!("the refusal or warning could not be recorded: {error}");
        }
    }
}

fn try_admit(
    (candidate, source, request): (&Candidate<'_>, &RequestSource, &Request),
    forbidden: &[String],
    spec: &mut Value,
    broker: &mut Broker,
    config: &Config,
) -> Result<Admission, AdmitError> {
    let Answer::Inventory(inventory) = broker.ask(&Ask::Inventory)? else { return unexpected() };
    let tree = candidate.open_tree(spec)?;
    let image = oci::inspect(spec, &tree, request, &inventory, config)?;
    let Answer::Granted(granted) = broker.ask(&admit_request(candidate, source, spec, image, forbidden))?
    else {
        return unexpected();
    };
    let edited = oci::check_mps_directories(spec, &tree, &granted.grant)
        .and_then(|()| oci::make_mount_points(&tree, &granted.grant))
        .map_err(AdmitError::from)
        .and_then(|()| Ok(oci::check_node_modes(spec, &granted.grant.nodes, source.keeps_groups())?))
        .and_then(|()| Ok(oci::edit(spec, &granted.grant)?));
    if let Err(error) = edited {
        let _ = broker.ask(&Ask::Withdraw { lease: granted.lease });
        return Err(error);
    }
    Ok(Admission::Granted { lease: granted.lease, warnings: granted.warnings })
}

fn admit_request(
    candidate: &Candidate<'_>,
    source: &RequestSource,
    spec: &Value,
    image: Image,
    forbidden: &[String],
) -> Ask {
    let Container { id, bundle, rootfs, record, .. } = candidate.container.clone();
    // The lease record and the edits are long, and the service does not need them.
    let is_sent = |key: &str| key.starts_with("sublet.") && !key.starts_with("sublet.lease.");
    let annotations = source.annotations.iter().filter(|(key, _)| is_sent(key));
    let us = std::process::id();
    Ask::Admit(Box::new(Admit {
        container: ContainerNames { id, bundle, rootfs, record },
        owner: Some(candidate.owner.pid).filter(|owner| u32::try_from(*owner) != Ok(us)),
        share: source.share.clone(),
        annotations: annotations.map(|(key, value)| (key.clone(), value.clone())).collect(),
        capabilities: oci::environment_value(spec, "NVIDIA_DRIVER_CAPABILITIES"),
        image,
        forbidden: forbidden.to_vec(),
    }))
}

fn unexpected<T>() -> Result<T, AdmitError> {
    Err(BrokerError::UnexpectedAnswer.into())
}

/// The user's leases, policy limits and remaining room, or the report of what their containers held, as the service has it.
pub fn own_status(ask: &Ask, config: &Config) -> Result<Value, AdmitError> {
    let Answer::Status(status) = Broker::new(config).ask(ask)? else { return unexpected() };
    Ok(status)
}

/// Before a process joins a container of a rootless engine, whose MPS daemon has the directory `public`.
///
/// The service restarts a daemon that does not answer. If the service is not running, a daemon that answers is
/// enough.
pub fn enter_remotely(config: &Config, public: &Path, id: &str, record: &Path) -> Result<(), AdmitError> {
    let ask = Ask::Enter { id: id.to_owned(), record: record.to_owned() };
    let missing = match Broker::new(config).ask(&ask) {
        Ok(Answer::Done(true)) => return Ok(()),
        Ok(Answer::Done(false)) => None,
        Ok(_) => return unexpected(),
        Err(refused @ BrokerError::Refused { .. }) => return Err(refused.into()),
        Err(error) => Some(error),
    };
    match (mps::answers(public, config)?, missing) {
        (true, _) => Ok(()),
        (false, Some(error)) => Err(error.into()),
        (false, None) => Err(AdmitError::NotHeld),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(dir: &Path) -> Config {
        Config { state_dir: dir.to_owned(), ..Config::default() }
    }

    #[test]
    fn containers_that_the_ledger_does_not_mention_need_no_service() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        assert_eq!(Remote { config: &config }.mark_ending("c1", Path::new("/r/c1")).unwrap(), None);
        std::fs::write(dir.path().join("ledger.json"), r#"{"leases":[{"id":"c1"}]}"#).unwrap();
        assert_eq!(Remote { config: &config }.mark_ending("c2", Path::new("/r/c2")).unwrap(), None);
        let error = Remote { config: &config }.mark_ending("c1", Path::new("/r/c1")).unwrap_err();
        assert!(error.to_string().starts_with("sublet serve is not running"), "{error}");
    }
}
