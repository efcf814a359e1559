//! Creates a MIG instance for a request that finds none, and destroys it (`[mig] dynamic`). Only the program `sublet`
//! uses the driver; this code runs it.

use std::cell::Cell;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::AdmitError;
use crate::broker::policy_limits::PolicyLimit;
use crate::config::Config;
use crate::inventory::{Device, Inventory};
use crate::ledger::{Awaited, LeaseId, Ledger, Store};
use crate::place::{Most, Order, Size, expected};
use crate::process::Process;
use crate::process::sublet;
use crate::request::Request;

/// The time limit of `sublet mig make`. It waits for other processes that do the same, and asks the driver for a new
/// inventory at the end.
const MAKE_LIMIT: Duration = Duration::from_secs(90);

/// The time limit of `sublet mig clear`. MPS daemons and changes by other processes end first.
const CLEAR_LIMIT: Duration = Duration::from_secs(60);

/// The reason if no GPU is eligible. The driver is not asked then.
pub const NO_SITE: &str =
    "every GPU that the request allows is drained, or not in MIG mode (`sublet mig apply` switches it on)";

/// The input of `sublet mig make`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ask {
    /// The instance.
    pub order: Order,
    /// The container for which it is kept.
    pub awaited: Awaited,
}

/// The answer of `sublet mig make`.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The instance exists, is kept for the lease, and is in the inventory.
    Made,
    /// It was not created.
    NotMade {
        /// One line.
        reason: String,
        /// Whether waiting may help.
        temporary: bool,
    },
}

/// Work that a thread which must not wait has left to another thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutOff {
    /// An instance would have to be created. This thread answered without one.
    pub make: bool,
    /// An instance has to be destroyed.
    pub clear: bool,
}

/// Whether a thread creates and destroys instances itself, or leaves that to another thread.
#[derive(Clone, Copy)]
pub(super) enum MigWork<'a> {
    /// Itself, at once, however long the driver takes.
    Now,
    /// Another thread does it. The needed work is noted.
    PutOff(&'a Cell<PutOff>),
}

impl MigWork<'_> {
    /// Whether the work is put off. `note` then records it.
    fn is_put_off(self, note: impl FnOnce(&mut PutOff)) -> bool {
        let Self::PutOff(cell) = self else { return false };
        let mut put_off = cell.get();
        note(&mut put_off);
        cell.set(put_off);
        true
    }
}

/// The instance to create for `request`, which has just found no place; `None`: none is created for it.
#[must_use]
pub fn order_instance(
    request: &Request,
    limit: Option<PolicyLimit<'_>>,
    inventory: &Inventory,
    ledger: &Ledger,
    config: &Config,
) -> Option<Result<Order, AdmitError>> {
    if !config.mig.dynamic {
        return None;
    }
    let mut order = Order::of(request, inventory, ledger, config)?;
    let Some(limit) = limit else { return Some(Ok(order)) };
    if !limit.rule.dynamic {
        return None;
    }
    // No instance is created for a user whose policy would not allow its lease.
    for site in &mut order.sites {
        let gpu = inventory.device(&site.gpu);
        site.most = gpu.map(|gpu| max_size(request, gpu, limit, ledger));
    }
    let may =
        limit.check(&expected(request), ledger).map_err(|error| AdmitError::PolicyLimit(Box::new(error)));
    Some(may.map(|()| order))
}

/// The largest instance that the user may have on `gpu`.
fn max_size(request: &Request, gpu: &Device, limit: PolicyLimit<'_>, ledger: &Ledger) -> Most {
    let beside = |ledger: &Ledger| Size::within(request, gpu, limit.room(ledger));
    Most { now: beside(ledger), ever: beside(&Ledger::empty(&ledger.boot_id)) }
}

/// Creates the instance. It is kept for lease `id` of `container` until that lease is taken or given up.
///
/// # Errors
/// Why it was not created, and whether waiting may help.
pub(super) fn make(
    order: Order,
    id: &LeaseId,
    container: &str,
    work: MigWork<'_>,
) -> Result<(), (String, bool)> {
    if order.sites.is_empty() {
        return Err((NO_SITE.to_owned(), false));
    }
    if work.is_put_off(|put_off| put_off.make = true) {
        return Err(("it is put off".to_owned(), true));
    }
    let asked = Process::current().map_err(|error| error.to_string()).and_then(|owner| {
        let awaited = Awaited { lease: id.clone(), container: container.to_owned(), owner };
        let ask = serde_json::to_string(&Ask { order, awaited }).map_err(|error| error.to_string())?;
        let (answer, warnings) =
            sublet::ask(&["mig", "make"], &ask, MAKE_LIMIT).map_err(|error| error.to_string())?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        serde_json::from_str(&answer).map_err(|error| format!("`sublet mig make`: {error}"))
    });
    match asked.map_err(|why| (why, true))? {
        Answer::Made => Ok(()),
        Answer::NotMade { reason, temporary } => Err((reason, temporary)),
    }
}

/// Keeps no instance for lease `id` any more, which is not taken.
pub(super) fn release(id: &LeaseId, store: &Store, work: MigWork<'_>) {
    let awaits = |ledger: &Ledger| {
        ledger
            .mig
            .dynamic_instances
            .iter()
            .any(|instance| instance.awaited.as_ref().is_some_and(|awaited| awaited.lease == *id))
    };
    if !store.read().is_ok_and(|ledger| awaits(&ledger)) {
        return;
    }
    match store.change(|ledger| ledger.stop_awaiting(id)) {
        Ok(_) => destroy_unneeded(store, work),
        Err(error) => tracing::warn!("{error}"),
    }
}

/// Destroys dynamic instances that no lease needs any more. The next command tries again what cannot be destroyed now.
pub(super) fn destroy_unneeded(store: &Store, work: MigWork<'_>) {
    let has_unneeded = store.read().is_ok_and(|ledger| ledger.has_unneeded());
    if !has_unneeded || work.is_put_off(|put_off| put_off.clear = true) {
        return;
    }
    match sublet::run(&["mig", "clear"], CLEAR_LIMIT) {
        Ok(warnings) => warnings.iter().for_each(|warning| tracing::warn!("{warning}")),
        Err(error) => tracing::warn!("{error}"),
    }
}
