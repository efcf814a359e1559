//! Where a share would be placed, for commands that change nothing: with the caller's own policy, where the
//! caller is a user without root.

use nix::unistd::geteuid;

use super::take::allowed;
use super::{AdmitError, dynamic, rootless};
use crate::config::Config;
use crate::inventory::Inventory;
use crate::ledger::{LeaseId, Ledger};
use crate::place::{Placement, place};
use crate::request::Request;
use crate::serve::caps::Cap;
use crate::serve::client::BrokerError;
use crate::serve::rule_of;

/// Where `request` would be placed now.
///
/// # Errors
/// Why it would be refused, in the same words.
pub fn preview(
    request: &Request,
    id: &LeaseId,
    inventory: &Inventory,
    ledger: &Ledger,
    config: &Config,
) -> Result<Placement, AdmitError> {
    let uid = geteuid().as_raw();
    let rule = rootless::applies(config).then(|| rule_of(uid, config)).transpose();
    let rule = rule.map_err(|reason| BrokerError::Refused { reason, temporary: false })?;
    let cap = rule.map(|rule| Cap { uid, rule });
    let allowed = allowed(cap, inventory, config)?;
    let placement = place(request, id, &allowed, ledger, config).map_err(|refusal| {
        match dynamic::order(request, cap, &allowed, ledger, config) {
            Some(Ok(order)) if !order.sites.is_empty() => AdmitError::WouldMake(Box::new(refusal.into())),
            _ => refusal.into(),
        }
    })?;
    cap.map_or(Ok(()), |cap| cap.check(&placement, ledger))
        .map_err(|error| AdmitError::Cap(Box::new(error)))?;
    Ok(placement)
}
