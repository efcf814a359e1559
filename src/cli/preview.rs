//! Where a share would be placed, for commands that change nothing. For a rootless user's containers, with that user's
//! policy limits.

use nix::unistd::geteuid;

use crate::mig::{self, Foreseen, Nvml};
use crate::serve::rule_of;
use sublet_core::admit::dynamic_mig::NO_SITE;
use sublet_core::admit::take_lease::allowed_inventory;
use sublet_core::admit::{AdmitError, dynamic_mig, is_remote, refresh};
use sublet_core::broker::client::BrokerError;
use sublet_core::broker::policy_limits::PolicyLimit;
use sublet_core::config::Config;
use sublet_core::inventory::Inventory;
use sublet_core::ledger::{LeaseId, Ledger};
use sublet_core::place::{Order, Placement, place};
use sublet_core::request::Request;

/// For whose containers a share is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Those of an engine that runs as root.
    Root,
    /// Those of this user without root, by `sublet serve` and within `[[policy]]`.
    User,
}

impl Whose {
    /// Those that this process would start itself.
    pub fn callers(config: &Config) -> Self {
        if is_remote(config) { Self::User } else { Self::Root }
    }
}

/// The MIG instances that would be created for containers before, and the driver that was asked about them.
#[derive(Default)]
pub struct Ahead {
    nvml: Option<Nvml>,
    /// In the order in which they would be created.
    pub instances: Vec<Foreseen>,
}

/// Where `request` would be placed now. As for a container, the driver is asked anew before a no that depends on what it
/// last reported; `inventory` is then replaced.
///
/// # Errors
/// The refusal that the request would get, in the same words.
pub fn preview(
    request: &Request,
    id: &LeaseId,
    inventory: &mut Inventory,
    ledger: &Ledger,
    whose: Whose,
    config: &Config,
) -> Result<Placement, AdmitError> {
    let look = |inventory: &Inventory| {
        preview_after(&mut Ahead::default(), request, id, (inventory, ledger), whose, config)
    };
    match look(inventory) {
        Err(error) if may_be_out_of_date(&error, config) => {
            *inventory = refresh(config)?;
            look(inventory)
        }
        found => found,
    }
}

/// Whether a refresh, which this process may run, could change `error`.
pub fn may_be_out_of_date(error: &AdmitError, config: &Config) -> bool {
    error.wants_refresh() && !is_remote(config)
}

/// Where `request` would be placed by this inventory, once the instances `ahead` have been created. If one would be
/// created for `request`, it is added.
pub fn preview_after(
    ahead: &mut Ahead,
    request: &Request,
    id: &LeaseId,
    (inventory, ledger): (&Inventory, &Ledger),
    whose: Whose,
    config: &Config,
) -> Result<Placement, AdmitError> {
    let uid = geteuid().as_raw();
    let rule = (whose == Whose::User).then(|| rule_of(uid, config)).transpose();
    let rule = rule.map_err(|reason| BrokerError::Refused { reason, temporary: false })?;
    let limit = rule.map(|rule| PolicyLimit { uid, rule });
    let allowed = allowed_inventory(limit, inventory, config)?;
    let placement =
        place(request, id, &allowed, ledger, config).map_err(|refusal| match dynamic_mig::order_instance(
            request, limit, &allowed, ledger, config,
        ) {
            Some(Ok(order)) => foreseen(ahead, &order, refusal.into(), (inventory, ledger), config),
            Some(Err(error)) => error,
            None => refusal.into(),
        })?;
    limit.map_or(Ok(()), |limit| limit.check(&placement, ledger))?;
    Ok(placement)
}

/// The result if an instance were created.
fn foreseen(
    ahead: &mut Ahead,
    order: &Order,
    refused: AdmitError,
    (inventory, ledger): (&Inventory, &Ledger),
    config: &Config,
) -> AdmitError {
    let refused = Box::new(refused);
    if order.sites.is_empty() {
        return AdmitError::Unmade { refused, why: NO_SITE.to_owned(), temporary: false };
    }
    let nvml = match ahead.nvml.take().map_or_else(|| Nvml::open(config, inventory), Ok) {
        Ok(nvml) => ahead.nvml.insert(nvml),
        Err(error) => return AdmitError::Unmade { refused, why: error.to_string(), temporary: false },
    };
    match mig::foresee(order, nvml, ledger, config.placement.policy, &ahead.instances) {
        Ok(Ok(foreseen)) => {
            let what = foreseen.what.clone();
            ahead.instances.push(foreseen);
            AdmitError::WouldMake { refused, what }
        }
        Ok(Err(none)) => AdmitError::Unmade { refused, why: none.reason, temporary: none.temporary },
        Err(error) => AdmitError::Unmade { refused, why: error.to_string(), temporary: true },
    }
}
