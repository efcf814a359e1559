//! Creates a MIG instance for a request that finds none (`[mig] dynamic`). Only the program `sublet`
//! uses the driver; this code runs it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::AdmitError;
use super::local::Local;
use crate::broker::policy_limits::PolicyLimit;
use crate::config::Config;
use crate::inventory::Inventory;
use crate::ledger::{Awaited, LeaseId, Ledger, Store};
use crate::place::{Most, Order, Size, expected};
use crate::process::{Process, sublet};
use crate::request::Request;

/// The time limit of `sublet mig make`. It waits for other processes that do the same, and asks the driver for a new
/// inventory at the end.
const MAKE_LIMIT: Duration = Duration::from_secs(90);

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

/// The instance to create for `request`, which has just found no place; `None`: none is created for it.
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
        // The largest instance that the user may have there.
        site.most = inventory.device(&site.gpu).map(|gpu| {
            let beside = |ledger: &Ledger| Size::within(request, gpu, limit.room(ledger));
            Most { now: beside(ledger), ever: beside(&Ledger::empty(&ledger.boot_id)) }
        });
    }
    Some(limit.check(&expected(request), ledger).map(|()| order).map_err(AdmitError::from))
}

impl Local<'_> {
    /// Creates the instance. It is kept for lease `id` of `container` until that lease is taken or given up.
    ///
    /// # Errors
    /// Why it was not created, and whether waiting may help.
    pub(super) fn make_instance(
        &self,
        order: Order,
        id: &LeaseId,
        container: &str,
    ) -> Result<(), (String, bool)> {
        if order.sites.is_empty() {
            return Err((NO_SITE.to_owned(), false));
        }
        if self.puts_off(|put_off| put_off.make = true) {
            return Err(("it is put off".to_owned(), true));
        }
        let asked = Process::current().map_err(|error| error.to_string()).and_then(|owner| {
            let awaited = Awaited { lease: id.clone(), container: container.to_owned(), owner };
            let ask = serde_json::to_string(&Ask { order, awaited }).map_err(|error| error.to_string())?;
            let (answer, warnings) =
                sublet::ask(&["mig", "make"], &ask, MAKE_LIMIT).map_err(|error| error.to_string())?;
            crate::log::warn(warnings);
            serde_json::from_str(&answer).map_err(|error| format!("`sublet mig make`: {error}"))
        });
        match asked.map_err(|why| (why, true))? {
            Answer::Made => Ok(()),
            Answer::NotMade { reason, temporary } => Err((reason, temporary)),
        }
    }

    /// Keeps no instance for lease `id` any more, which is not taken.
    pub(super) fn release_instance(&self, id: &LeaseId, store: &Store) {
        let is_kept = |ledger: Ledger| {
            let mut awaited =
                ledger.mig.dynamic_instances.iter().filter_map(|instance| instance.awaited.as_ref());
            awaited.any(|awaited| awaited.lease == *id)
        };
        if store.read().is_ok_and(is_kept) {
            match store.change(|ledger| ledger.stop_awaiting(id)) {
                Ok(_) => self.destroy_unneeded(store),
                Err(error) => tracing::warn!("{error}"),
            }
        }
    }
}
