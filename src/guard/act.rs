//! What is done about a process: reported, ended, or ended with its container.

use std::os::fd::{AsFd as _, OwnedFd};

use super::book::{Event, now};
use super::judge::{Holder, Offence, Verdict};
use super::look::lease_of;
use crate::config::{Action, Config};
use crate::inventory;
use crate::ledger::{Lease, Ledger, Store};
use crate::mps;
use crate::process::Process;
use crate::serve::{kernel, owns};
use crate::text::safe;

/// Does what `verdict` says, and tells it. `None`: the process has gone by itself, or it is not that lease's
/// any more.
pub(super) fn act(verdict: &Verdict, store: &Store, config: &Config) -> Option<Event> {
    // Read anew: the lease may have ended since the look.
    let ledger = store.read().ok()?;
    let held = Held::take(&verdict.holder, &ledger)?;
    let lease = held.lease;
    let done = match verdict.action {
        Action::Report => "reported only".to_owned(),
        Action::Terminate => held.end(config),
        Action::Container => {
            let first = held.end(config);
            lease.and_then(end_container).unwrap_or(first)
        }
    };
    Some(event(verdict, lease, &done))
}

/// A process that cannot become another one meanwhile, and is still what it was seen to be.
struct Held<'a> {
    pidfd: OwnedFd,
    process: Process,
    is_client: bool,
    lease: Option<&'a Lease>,
}

impl<'a> Held<'a> {
    fn take(holder: &Holder, ledger: &'a Ledger) -> Option<Self> {
        let pid = holder.process.pid;
        let pidfd = kernel::pidfd_open(pid).ok()?;
        // What is read by its number from here on is its own only if it is the same process still.
        let told = inventory::describe(pid, 0)?;
        let lease = lease_of(&told, ledger);
        if lease != holder.lease || told.mps_server || !holder.process.is_alive() {
            return None;
        }
        let lease = lease.and_then(|id| ledger.lease(&id));
        // A user names the processes of their containers: root ends none that are not the user's own.
        let theirs = lease.is_none_or(|lease| !lease.brokered || owns(pid, lease.container.uid));
        theirs.then_some(Self { pidfd, process: holder.process, is_client: holder.is_client, lease })
    }

    /// MPS lets go of a client that it ends itself without harm to the others; the signal ends what goes on.
    fn end(&self, config: &Config) -> String {
        if let Some(key) = self.lease.and_then(|lease| lease.server.as_ref()).filter(|_| self.is_client) {
            if let Err(error) = mps::terminate_client(key, self.process.pid, config) {
                tracing::debug!("terminate_client {}: {error}", self.process.pid);
            }
        }
        match kernel::kill(self.pidfd.as_fd()) {
            Ok(()) => "it was ended".to_owned(),
            // By the end of its context.
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => "it was ended".to_owned(),
            Err(error) => format!("it cannot be ended: {error}"),
        }
    }
}

/// Ends the container by its first process: the others of its PID namespace go with it (`pid_namespaces(7)`).
fn end_container(lease: &Lease) -> Option<String> {
    let init = lease.init.as_ref()?;
    let pidfd = kernel::pidfd_open(init.process.pid).ok()?;
    let theirs = init.process.is_alive() && (!lease.brokered || owns(init.process.pid, lease.container.uid));
    let ended = theirs.then(|| kernel::kill(pidfd.as_fd()))?;
    Some(match ended {
        Ok(()) => "its container was ended".to_owned(),
        Err(error) => format!("its container cannot be ended: {error}"),
    })
}

fn event(verdict: &Verdict, lease: Option<&Lease>, done: &str) -> Event {
    let holder = &verdict.holder;
    let container = lease.map(|lease| lease.container.name().into_owned());
    let whose = container
        .as_ref()
        .map_or_else(|| "of no lease".to_owned(), |name| format!("of container {}", safe(name)));
    let text = format!(
        "process {} (pid {}) {whose} on {} {}: {done}",
        safe(&holder.name),
        holder.process.pid,
        safe(&verdict.device),
        did(verdict)
    );
    Event {
        time: now(),
        offence: verdict.offence,
        action: verdict.action,
        container_id: container.map(|name| safe(&name)),
        uid: lease.map_or(0, |lease| lease.container.uid),
        device: verdict.device.clone(),
        pid: holder.process.pid,
        name: safe(&holder.name),
        text,
    }
}

fn did(verdict: &Verdict) -> String {
    let mib = |bytes: u64| bytes >> 20;
    let (used, allowed) = (verdict.used, verdict.allowed);
    match verdict.offence {
        Offence::Memory => format!(
            "has {} MiB, with which its container passed its sublet.memory ({} of {} MiB)",
            mib(verdict.holder.memory_bytes),
            mib(used),
            mib(allowed)
        ),
        Offence::Bypass => "computes beside its MPS server, without limits".to_owned(),
        Offence::Clients => {
            format!(
                "is one of {used} MPS clients, where sublet.processes says {allowed}, and others need the place"
            )
        }
        Offence::Left => "was left behind by its container".to_owned(),
        Offence::Stranger => "computes there without a lease".to_owned(),
    }
}
