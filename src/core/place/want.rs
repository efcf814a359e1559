//! A request on one device, and why the device does not serve it.

use super::bookings::Account;
use crate::config::Config;
use crate::inventory::{Device, Inventory};
use crate::ledger::{DaemonKey, Ledger};
use crate::request::Request;
use crate::share::{Isolation, Mode};

/// The inventory, ledger and configuration that a request is compared with.
#[derive(Clone, Copy)]
pub(crate) struct World<'a> {
    pub inventory: &'a Inventory,
    pub ledger: &'a Ledger,
    pub config: &'a Config,
}

/// Why a device cannot serve the request.
#[derive(Clone, Debug)]
pub(super) struct Misfit {
    /// The reason. In messages it follows the device's name.
    pub reason: String,
    /// Whether waiting could help.
    pub temporary: bool,
    /// Whether a refresh of the inventory could help.
    pub refresh: bool,
}

impl Misfit {
    pub(super) fn never(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), temporary: false, refresh: false }
    }

    pub(super) fn now(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), temporary: true, refresh: false }
    }

    /// NVML does not report it, and waiting does not change that.
    pub(super) fn not_reported(reason: impl Into<String>) -> Self {
        Self { refresh: true, ..Self::never(reason) }
    }

    pub(super) fn as_reported(reason: impl Into<String>) -> Self {
        Self { refresh: true, ..Self::now(reason) }
    }
}

/// A request on one device, completed by that device's configuration.
pub(super) struct Want<'a> {
    pub request: &'a Request,
    pub device: &'a Device,
    pub mode: Mode,
    pub isolation: Isolation,
    /// The use of the device that it will have in the bookings.
    pub used_as: Mode,
    pub daemon: Option<DaemonKey>,
    pub memory: Option<u64>,
    /// Bytes that it adds to the bookings, including those of a new server.
    pub books: u64,
    pub account: Account<'a>,
    /// One of several devices of the container.
    pub several: bool,
}
