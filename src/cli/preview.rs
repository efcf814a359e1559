//! Where a share would be placed, for commands that change nothing, and what that protects its container from. For a
//! rootless user's containers, with that user's policy limits.

use std::path::Path;

use nix::unistd::{AccessFlags, access, geteuid};

use crate::mig::{self, Foreseen, Nvml};
use sublet_core::admit::dynamic_mig::NO_SITE;
use sublet_core::admit::{
    AdmitError, Asks, confirmed_inventory, dynamic_mig, is_remote, place_in_order, refresh,
};
use sublet_core::broker::client::BrokerError;
use sublet_core::broker::policy_limits::PolicyLimit;
use sublet_core::config::Config;
use sublet_core::inventory::{self, Inventory};
use sublet_core::ledger::{Container, LeaseId, Ledger, LedgerError, Store, Waiter};
use sublet_core::place::{Placement, Refusal, may_make_room, place_within};
use sublet_core::process::uptime_milliseconds;
use sublet_core::request::Request;
use sublet_core::share::{Isolation, Mode};

/// For whose containers a share is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Containers of an engine that runs as root.
    Root,
    /// Containers of this user without root, by `sublet serve` and within `[[policy]]`.
    User,
}

impl Whose {
    /// Containers that this process would start itself.
    pub fn callers(config: &Config) -> Self {
        if is_remote(config) { Self::User } else { Self::Root }
    }

    /// Containers of root's engines, for root and for a user who may use Docker's socket: dockerd starts these as root,
    /// and no `[[policy]]` limits them. Other users, and whoever asks for it, mean their rootless containers.
    pub fn meant(rootless: bool, config: &Config) -> Self {
        Self::callers(config).or_dockers(rootless, &config.retry.socket)
    }

    fn or_dockers(self, rootless: bool, socket: &Path) -> Self {
        let by_docker = || !rootless && access(socket, AccessFlags::W_OK).is_ok();
        if self == Self::User && by_docker() { Self::Root } else { self }
    }

    /// The word for JSON.
    pub fn word(self, config: &Config) -> &'static str {
        match self {
            Self::User => "rootless",
            Self::Root if is_remote(config) => "docker",
            Self::Root => "root",
        }
    }

    /// Said where root's containers are meant although the caller is not root.
    pub fn remark(self, config: &Config) -> Option<&'static str> {
        (self.word(config) == "docker").then_some("Docker's containers (--rootless: your own)")
    }

    /// The devices. Devices of root's containers do not come from `sublet serve`.
    pub fn inventory(self, config: &Config) -> anyhow::Result<Inventory> {
        Ok(match self {
            Self::Root if is_remote(config) => inventory::load(config)?,
            _ => confirmed_inventory(config)?,
        })
    }
}

/// The MIG instances that would be created for containers before, and the driver that was asked about them.
#[derive(Default)]
pub struct Ahead {
    nvml: Option<Nvml>,
    /// In the order in which they would be created.
    pub instances: Vec<Foreseen>,
}

/// The remark on an answer about an empty host.
pub const EMPTY: &str = "this is as if nothing were on the GPUs (--empty)";

/// The host as it is or, if `empty`, with nothing on its GPUs. Drained devices stay so.
pub fn emptied(empty: bool, (ledger, inventory): (Ledger, Inventory)) -> (Ledger, Inventory) {
    let without =
        |ledger: Ledger| Ledger { drained: ledger.drained, drains: ledger.drains, ..Ledger::empty("") };
    if empty { (without(ledger), inventory.idle()) } else { (ledger, inventory) }
}

/// The ledger as this user may see it, with those of its waiters who are still there.
///
/// # Errors
/// It cannot be read.
pub fn seen_ledger(config: &Config) -> Result<Ledger, LedgerError> {
    let mut ledger = Store::open(&config.state_dir)?.peek()?.seen_by(geteuid().as_raw());
    ledger.waiters.retain(Waiter::is_there);
    Ok(ledger)
}

/// Where `request` would be placed now, behind those who wait; one of these has its place by its `id`. As for a container, the
/// driver is asked anew before a no that depends on what it last reported, unless the host is taken for `empty`; `inventory`
/// is then replaced.
///
/// # Errors
/// The refusal that the request would get, in the same words.
pub fn preview(
    request: &Request,
    id: &LeaseId,
    (inventory, ledger, empty): (&mut Inventory, &Ledger, bool),
    whose: Whose,
    config: &Config,
) -> Result<Placement, AdmitError> {
    let look = |inventory: &Inventory| {
        preview_after(&mut Ahead::default(), request, id, (inventory, ledger), whose, config)
    };
    match look(inventory) {
        Err(error) if !empty && may_be_out_of_date(&error, config) => {
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

/// Where `request` would be placed by this inventory behind those who wait, once the instances `ahead` have been created. If
/// one would be created for `request`, it is added.
pub fn preview_after(
    ahead: &mut Ahead,
    request: &Request,
    id: &LeaseId,
    (inventory, ledger): (&Inventory, &Ledger),
    whose: Whose,
    config: &Config,
) -> Result<Placement, AdmitError> {
    let uid = geteuid().as_raw();
    let rule = (whose == Whose::User).then(|| crate::policy_rule::rule_of(uid, config)).transpose();
    let rule =
        rule.map_err(|reason| BrokerError::Refused { reason, temporary: false, candidates: Vec::new() })?;
    let limit = rule.map(|rule| PolicyLimit { uid, rule });
    let allowed = sublet_core::admit::take_lease::allowed_inventory(limit, inventory, config)?;
    let asks = Asks { id, container: &Container::default(), by: None, request };
    let refusal = match find_room(asks, limit, (&allowed, inventory), ledger, config)? {
        Ok(placement) => return Ok(placement),
        Err(refusal) => refusal,
    };
    let Some(order) = dynamic_mig::order_instance(request, limit, &allowed, ledger, config) else {
        let refused = AdmitError::from(refusal);
        let sources = (&*allowed, ledger, config);
        let makes_room = whose == Whose::Root
            && refused.is_temporary()
            && may_make_room(request, id, sources, uptime_milliseconds());
        let serves = || ledger.keeper.is_some_and(|keeper| keeper.is_alive());
        return Err(if makes_room { refused.with_room_by_service(serves()) } else { refused });
    };
    let (order, refused) = (order?, Box::new(refusal.into()));
    if order.sites.is_empty() {
        return Err(AdmitError::Unmade { refused, why: NO_SITE.to_owned(), temporary: false });
    }
    let nvml = match ahead.nvml.take().map_or_else(|| Nvml::open(config, inventory), Ok) {
        Ok(nvml) => ahead.nvml.insert(nvml),
        Err(error) => return Err(AdmitError::Unmade { refused, why: error.to_string(), temporary: false }),
    };
    Err(match mig::foresee(&order, nvml, ledger, config.placement.policy, &ahead.instances) {
        Ok(Ok(foreseen)) => {
            let what = foreseen.label.clone();
            ahead.instances.push(foreseen);
            AdmitError::WouldMake { refused, what }
        }
        Ok(Err(none)) => AdmitError::Unmade { refused, why: none.reason, temporary: none.temporary },
        Err(error) => AdmitError::Unmade { refused, why: error.to_string(), temporary: true },
    })
}

/// Where there is room now for who asks by this policy, behind those who wait: among the `allowed` devices of the `host`. The
/// inner error: nowhere, but a MIG instance might be created.
///
/// # Errors
/// A refusal whatever instances there are.
pub fn find_room(
    asks: Asks<'_>,
    limit: Option<PolicyLimit<'_>>,
    (allowed, host): (&Inventory, &Inventory),
    ledger: &Ledger,
    config: &Config,
) -> Result<Result<Placement, Box<Refusal>>, AdmitError> {
    let check = |placement: &Placement| limit.map_or(Ok(()), |limit| limit.check(placement, ledger));
    limit.map_or(Ok(()), |limit| limit.check_request(asks.request, config))?;
    let allows = |placement: &Placement| check(placement).is_ok();
    match place_within(asks.request, asks.id, allowed, ledger, config, &allows) {
        Ok(placement) => {
            let placement = place_in_order(asks, placement, (allowed, host), ledger, config)?;
            check(&placement)?;
            Ok(Ok(placement))
        }
        Err(refusal) => Ok(Err(refusal.of_policy(allowed, host))),
    }
}

// The protections of a share, and their limits. Each line is measured in docs/evidence or follows from
// the driver's documentation.

/// The dangers that the share protects against.
pub fn protects(placement: &Placement) -> Vec<&'static str> {
    let turns = match (placement.mode, placement.isolation, placement.daemon.is_some()) {
        (Mode::Mps, Isolation::Shared, _) => "containers on the GPU run at the same time, without turns",
        (Mode::Mps, Isolation::Dedicated, _) | (Mode::TimeSlice, _, true) => {
            "a crash in another container does not affect this one; containers take turns"
        }
        (Mode::TimeSlice, ..) => {
            "a crash in another container does not affect this one, as with plain --gpus"
        }
        (Mode::Exclusive, ..) => "no other container gets this GPU",
        (Mode::Mig, ..) => "the instance has its own memory and SMs, in hardware",
    };
    let mut lines = vec!["SMs and memory booked for this container are booked for no other", turns];
    lines.extend(placement.sm.map(|_| {
        "the driver enforces this container's SM limit, and no client can raise its limit above the server's"
    }));
    if placement.memory_bytes.is_some() && placement.daemon.is_some() {
        lines.push("the driver enforces the memory limit on programs that do not change their environment");
        lines.push(match placement.isolation {
            Isolation::Shared if placement.mode == Mode::Mps => {
                "a program without that environment gets the limits of the largest share on its MPS server"
            }
            _ => "a program without that environment has the same limits",
        });
    }
    lines
}

/// The dangers that the share does not protect against.
pub fn does_not_protect(placement: &Placement) -> Vec<&'static str> {
    let (mode, has_daemon) = (placement.mode, placement.daemon.is_some());
    let is_limited = placement.memory_bytes.is_some();
    let is_shared = (mode, placement.isolation) == (Mode::Mps, Isolation::Shared);
    let mut lines = Vec::new();
    lines.extend(is_shared.then_some(
        "a GPU fault in any container of this MPS server ends the work of all of them; \
         sublet.isolation=dedicated does not",
    ));
    lines.extend((is_shared && is_limited).then_some(
        "while a share of the same MPS server has no sublet.memory, a program without its container's environment \
         has no memory limit",
    ));
    if is_limited && has_daemon {
        lines.extend([
            "a hostile program can set an invalid CUDA_MPS_PINNED_DEVICE_MEM_LIMIT for itself and allocate more \
             memory",
            "the limits are per process: more processes than sublet.processes exceed the share",
        ]);
    }
    lines.extend(has_daemon.then_some(
        "a hostile program can unset CUDA_MPS_PIPE_DIRECTORY and run beside MPS, unless the compute mode is \
         EXCLUSIVE_PROCESS",
    ));
    lines.extend((mode == Mode::Mig && is_limited).then_some(
        "other compute instances of the GPU instance use the same memory, and none is limited to a part of it",
    ));
    lines.extend((is_limited && mode == Mode::TimeSlice && !has_daemon).then_some(
        "the memory limit is watched by the guard, and not enforced by the driver: a program may pass it for a moment",
    ));
    lines.extend((!placement.suspend.is_never()).then_some(
        "it may be suspended (sublet suspend): its CUDA calls then wait, and its GPU memory is in host memory",
    ));
    let has_all_memory = !is_limited && !matches!(mode, Mode::Exclusive | Mode::Mig);
    lines.extend(
        has_all_memory.then_some("without sublet.memory, each container can allocate all the free memory"),
    );
    let takes_turns = mode == Mode::TimeSlice && !has_daemon;
    lines.extend(
        takes_turns.then_some("turns are equal per process: a container with more processes gets more time"),
    );
    lines.push(match mode {
        Mode::Mig => "PCIe, power and clocks are shared with all other work on the GPU",
        _ => "caches, memory bandwidth and PCIe are shared with all other work on the GPU",
    });
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::inventory::ComputeMode;
    use sublet_core::ledger::fixture::lease;
    use sublet_core::place::fixture::{device, host};

    #[test]
    fn an_empty_host_has_its_devices_and_keeps_drained_ones() {
        let mut busy = device(0);
        (busy.memory_free_bytes, busy.compute_mode) = (0, ComputeMode::ExclusiveProcess);
        let ledger = Ledger {
            leases: vec![lease(1, "GPU-0")],
            drained: vec!["GPU-1".to_owned()],
            unexplained: vec!["GPU-0".to_owned()],
            ..Ledger::empty("boot")
        };
        let world = (ledger.clone(), host(vec![busy, device(1)]));
        assert_eq!(emptied(false, world.clone()), world);
        let (ledger, inventory) = emptied(true, world);
        assert!(ledger.leases.is_empty() && ledger.unexplained.is_empty() && ledger.drained == ["GPU-1"]);
        assert_eq!(inventory, host(vec![device(0), device(1)]));
    }

    #[test]
    fn who_may_use_dockers_socket_means_dockers_containers() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, none) = (dir.path().join("docker.sock"), dir.path().join("none"));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(Whose::User.or_dockers(false, &socket), Whose::Root);
        assert_eq!(Whose::User.or_dockers(true, &socket), Whose::User);
        assert_eq!(Whose::User.or_dockers(false, &none), Whose::User);
        assert_eq!(Whose::Root.or_dockers(true, &none), Whose::Root);
    }
}
