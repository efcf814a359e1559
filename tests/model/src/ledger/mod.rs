//! The ledger as far as the model needs it.
//!
//! Amounts are small: SM in quarters, memory in units of which a device has [`MEMORY`].

mod changes;

pub use changes::{Answer, Call};

use crate::Mutation;

/// Containers.
pub const CONTAINERS: usize = 3;
/// Devices.
pub const DEVICES: usize = 2;
/// SMs of a device, in quarters.
pub const SM: u8 = 4;
/// Memory of a device that can be booked.
pub const MEMORY: u8 = 4;
/// No limit.
pub const UNLIMITED: u8 = u8::MAX;

/// What a container asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Share {
    /// `sublet.mode=mps` with `sublet.sm` and `sublet.memory`.
    Mps {
        /// Quarters.
        sm: u8,
        /// Units; `None`: no limit.
        memory: Option<u8>,
    },
    /// `sublet.mode=exclusive`.
    Exclusive,
}

/// `ledger::DefaultLimits`; the default admits nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Quarters.
    pub sm: u8,
    /// Units, or [`UNLIMITED`].
    pub memory: u8,
}

impl Limits {
    /// Those of a new server.
    pub const NONE: Self = Self { sm: SM, memory: UNLIMITED };

    /// `DefaultLimits::admits`.
    #[must_use]
    pub const fn admits(self, needed: Self) -> bool {
        needed.sm <= self.sm && needed.memory <= self.memory
    }

    /// `DefaultLimits::or`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { sm: self.sm.max(other.sm), memory: self.memory.max(other.memory) }
    }

    /// `DefaultLimits::and`.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { sm: self.sm.min(other.sm), memory: self.memory.min(other.memory) }
    }
}

impl Share {
    /// `Lease::default_limits`.
    #[must_use]
    pub fn limits(self) -> Limits {
        match self {
            Self::Mps { sm, memory } => Limits { sm, memory: memory.unwrap_or(UNLIMITED) },
            Self::Exclusive => Limits::default(),
        }
    }

    /// Whether it has a daemon.
    #[must_use]
    pub const fn is_mps(self) -> bool {
        matches!(self, Self::Mps { .. })
    }
}

/// `ledger::LeaseState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseState {
    /// The container is being created.
    Pending,
    /// The container exists.
    Active,
    /// Its processes are ending.
    Ending,
}

/// `Lease::owner`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The shim that creates the container.
    Shim,
    /// The shim that deletes it.
    Delete,
}

/// `ledger::Lease` of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    /// Its device.
    pub device: u8,
    /// Where it is in its life.
    pub state: LeaseState,
    /// Who has to do with it now.
    pub owner: Owner,
    /// Whether the container's first process is known.
    pub init: bool,
}

/// `ledger::DaemonState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DaemonState {
    /// Being started.
    Starting,
    /// Answers.
    Serving,
    /// Being stopped.
    Stopping,
    /// Not running although a lease wants it.
    Down,
}

/// `ledger::MpsDaemon` of one device.
#[expect(clippy::struct_excessive_bools, reason = "so many are in the ledger, or stand for a value there")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Daemon {
    /// Its state.
    pub state: DaemonState,
    /// Whether a process is recorded.
    pub process: bool,
    /// The recorded limits.
    pub limits: Limits,
    /// Whether `answered_at` is not 0: no change of its limits is under way.
    pub answered: bool,
    /// Whether `idle_since` is there.
    pub idle: bool,
    /// `mode_left`.
    pub mode_left: bool,
}

/// `ledger.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ledger {
    /// By container.
    pub leases: [Option<Lease>; CONTAINERS],
    /// By device.
    pub daemons: [Option<Daemon>; DEVICES],
    /// Devices whose compute mode sublet changed.
    pub compute_modes: [bool; DEVICES],
    /// Whether a process of `sublet serve` is recorded.
    pub keeper: bool,
    /// `waiters`, by container: the place of each, from 1 on; 0: it has none.
    pub waiting: [u8; CONTAINERS],
}

impl Ledger {
    /// `Ledger::empty`.
    pub const EMPTY: Self = Self {
        leases: [None; CONTAINERS],
        daemons: [None; DEVICES],
        compute_modes: [false; DEVICES],
        keeper: false,
        waiting: [0; CONTAINERS],
    };
}

/// A container's processes, as `ledger::liveness` can see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Life {
    /// It was never created.
    Never,
    /// Its first process runs.
    Running,
    /// Its first process has ended, and others in its cgroup have not.
    FirstGone,
    /// Nothing of it is left.
    Gone,
}

/// What `reclaim` finds outside the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The containers' processes.
    pub lives: [Life; CONTAINERS],
    /// Whether the runtime has a record of them.
    pub records: [bool; CONTAINERS],
    /// Whether the shims that create them run.
    pub shims: [bool; CONTAINERS],
    /// Whether the shims that delete them run.
    pub deletes: [bool; CONTAINERS],
    /// Whether the devices' daemons run.
    pub daemons: [bool; DEVICES],
}

impl Ledger {
    /// `Ledger::on_daemon` is not empty.
    #[must_use]
    pub fn is_wanted(&self, device: usize, shares: &[Share]) -> bool {
        self.wanted(device, shares).is_some()
    }

    /// `Ledger::wanted_default_limits`.
    #[must_use]
    pub fn wanted(&self, device: usize, shares: &[Share]) -> Option<Limits> {
        self.on(device, shares).filter(|share| share.is_mps()).map(Share::limits).reduce(Limits::or)
    }

    /// Shares on `device`.
    pub fn on<'a>(&'a self, device: usize, shares: &'a [Share]) -> impl Iterator<Item = Share> + 'a {
        let leases = self.leases.iter().zip(shares);
        leases
            .filter(move |(lease, _)| lease.is_some_and(|lease| usize::from(lease.device) == device))
            .map(|(_, share)| *share)
    }

    /// `place`, for one device.
    #[must_use]
    pub fn has_room(
        &self,
        share: Share,
        device: usize,
        shares: &[Share],
        mutation: Option<Mutation>,
    ) -> bool {
        fits(self.on(device, shares), share, mutation)
    }

    /// The containers that wait before `container`, in order; before one that does not wait, all.
    #[must_use]
    pub fn before(&self, container: usize) -> Vec<usize> {
        let own = self.waiting[container];
        let is_before = |other: &usize| {
            let place = self.waiting[*other];
            *other != container && place > 0 && (own == 0 || place < own)
        };
        let mut before: Vec<usize> = (0..CONTAINERS).filter(is_before).collect();
        before.sort_by_key(|other| self.waiting[*other]);
        before
    }

    /// `admit::place_in_order`: `container` has room on `device` beside those of `before` that have room, on whichever of the
    /// `devices` placement would choose for them.
    #[must_use]
    pub fn is_turn_of(
        &self,
        container: usize,
        device: usize,
        before: &[usize],
        (shares, devices): (&[Share], usize),
    ) -> bool {
        let Some((first, others)) = before.split_first() else {
            return self.has_room(shares[container], device, shares, None);
        };
        let ahead = |on: usize| {
            let mut ahead = *self;
            let (state, owner) = (LeaseState::Pending, Owner::Shim);
            let device = u8::try_from(on).unwrap_or_default();
            ahead.leases[*first] = Some(Lease { device, state, owner, init: false });
            ahead
        };
        let mut chosen =
            (0..devices).filter(|on| self.has_room(shares[*first], *on, shares, None)).peekable();
        if chosen.peek().is_none() {
            return self.is_turn_of(container, device, others, (shares, devices));
        }
        chosen.any(|on| ahead(on).is_turn_of(container, device, others, (shares, devices)))
    }

    /// It waits no more, and those behind it move up.
    pub(super) fn leave(&mut self, container: usize) {
        let place = std::mem::take(&mut self.waiting[container]);
        for other in self.waiting.iter_mut().filter(|other| place > 0 && **other > place) {
            *other -= 1;
        }
    }

    /// `Ledger::conflicting_daemons`, on the device of the lease of `container`.
    #[must_use]
    pub fn conflicting_daemons(&self, container: usize, shares: &[Share]) -> Option<usize> {
        let device = usize::from(self.leases[container]?.device);
        let other = !shares[container].is_mps() && self.daemons[device].is_some();
        (other && !self.is_wanted(device, shares)).then_some(device)
    }
}

/// Whether `share` has room beside `others` on one device.
pub fn fits(others: impl Iterator<Item = Share>, share: Share, mutation: Option<Mutation>) -> bool {
    let (mut sms, mut memories) = (0, 0);
    for other in others {
        match (other, share) {
            (Share::Mps { sm, memory }, Share::Mps { .. }) => {
                sms += sm;
                memories += memory.unwrap_or(0);
            }
            _ if mutation == Some(Mutation::MixUses) => {}
            _ => return false,
        }
    }
    match share {
        Share::Mps { sm, memory } => sms + sm <= SM && memories + memory.unwrap_or(0) <= MEMORY,
        Share::Exclusive => true,
    }
}
