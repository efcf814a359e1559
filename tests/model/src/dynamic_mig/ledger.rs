//! The ledger as far as dynamic MIG needs it, and every change that the code makes to it, each under one lock.

use super::{CONTAINERS, PLACES};
use crate::Mutation;
use crate::ledger::Life;

/// `ledger::Lease` of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    /// The place of its instance.
    pub place: usize,
    /// Whether the container's first process is known.
    pub init: bool,
}

/// `ledger::DynamicInstance` at one place.
#[expect(clippy::struct_excessive_bools, reason = "so many are in the ledger")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DynamicInstance {
    /// Whether its GPU instance id is known.
    pub gi: bool,
    /// Whether its UUID is known.
    pub uuid: bool,
    /// The container for which it is kept.
    pub awaited: Option<usize>,
    /// It is being destroyed.
    pub going: bool,
    /// sublet is destroying its compute instance, or has seen that it has none.
    pub emptied: bool,
}

impl DynamicInstance {
    /// One that is to be created.
    const fn new(awaited: Option<usize>) -> Self {
        Self { gi: false, uuid: false, awaited, going: false, emptied: false }
    }
}

/// `ledger.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ledger {
    /// By container.
    pub leases: [Option<Lease>; CONTAINERS],
    /// `mig.dynamic_instances`, by place.
    pub instances: [Option<DynamicInstance>; PLACES],
    /// Whether `mig.under_way` is there.
    pub under_way: bool,
}

/// What `reclaim` finds outside the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The containers' processes.
    pub lives: [Life; CONTAINERS],
    /// Whether the shims that create them run.
    pub shims: [bool; CONTAINERS],
    /// Whether the process that changes instances runs.
    pub change: bool,
}

/// A change of the ledger: one [`Ledger::call`] is one `Store::update`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// `reclaim` of `ledger::liveness`.
    Reclaim,
    /// `Search::look`: the lease of a container on an instance.
    Take {
        /// The container.
        container: usize,
        /// The place.
        place: usize,
    },
    /// `Search::look` of this container that finds no MIG device.
    TakeNone(usize),
    /// `Search::look` of this container, by an inventory from before the last change of instances.
    LayoutChanged(usize),
    /// `Ledger::stop_awaiting` in `dynamic_mig::give_up` of this container.
    AwaitNoMore(usize),
    /// `Ledger::remove` of this container's lease.
    Remove(usize),
    /// `Fence::raise`.
    BeginMig,
    /// `Fence::raise` while another change is under way.
    MigBusy,
    /// `Making::clear` begins; for `mig make`, with the container for which it is.
    MarkUnneeded(Option<usize>),
    /// `Making::make_one` begins.
    Record {
        /// The place.
        place: usize,
        /// The container for which the instance is kept.
        awaited: Option<usize>,
    },
    /// `Making::steps` notes the GPU instance id.
    NoteGi(usize),
    /// `Making::steps` notes the UUID.
    NoteUuid(usize),
    /// `Making::destroy` notes what it has found at this place.
    NoteSeen {
        /// The place.
        place: usize,
        /// Whether the GPU instance has its compute instance.
        compute: bool,
    },
    /// `Making::destroy` finds nothing of sublet's at this place.
    NoteGoing(usize),
    /// `Ledger::forget_destroyed`.
    ForgetDestroyed(usize),
    /// The fence falls.
    EndMig {
        /// Whether instances were created or destroyed behind it.
        changed: bool,
    },
}

impl Call {
    /// The place of the instance that it concerns; the first one, if it concerns all.
    pub(super) const fn place(self) -> Option<usize> {
        match self {
            Self::Take { place, .. } | Self::Record { place, .. } | Self::NoteSeen { place, .. } => {
                Some(place)
            }
            Self::NoteGi(place)
            | Self::NoteUuid(place)
            | Self::NoteGoing(place)
            | Self::ForgetDestroyed(place) => Some(place),
            Self::Reclaim | Self::TakeNone(_) | Self::MarkUnneeded(_) => Some(0),
            Self::LayoutChanged(_)
            | Self::AwaitNoMore(_)
            | Self::Remove(_)
            | Self::BeginMig
            | Self::MigBusy
            | Self::EndMig { .. } => None,
        }
    }
}

impl Ledger {
    /// `Ledger::empty`.
    pub const EMPTY: Self = Self { leases: [None; CONTAINERS], instances: [None; PLACES], under_way: false };

    /// `Store::update`: reclaims, and makes the change. Returns whether earlier inventories are out of date.
    pub(super) fn call(&mut self, call: Call, seen: Seen, mutation: Option<Mutation>) -> bool {
        let ended = self.reclaim(seen, mutation);
        self.change(call, mutation) || ended
    }

    /// `ledger::liveness::reclaim`. Returns whether a dead process's change has ended.
    pub(super) fn reclaim(&mut self, seen: Seen, mutation: Option<Mutation>) -> bool {
        for container in 0..CONTAINERS {
            let Some(lease) = &mut self.leases[container] else { continue };
            let runs = seen.lives[container] == Life::Running;
            lease.init |= runs;
            let known_to_have_ended = lease.init && !runs;
            if known_to_have_ended || !lease.init && !seen.shims[container] {
                self.leases[container] = None;
            }
        }
        for instance in self.instances.iter_mut().flatten() {
            let alive = |container: &usize| seen.shims[*container] || mutation == Some(Mutation::AwaitDead);
            instance.awaited = instance.awaited.filter(alive);
        }
        self.under_way && !seen.change && {
            self.under_way = false;
            true
        }
    }

    /// The change itself. Returns whether earlier inventories are out of date.
    fn change(&mut self, call: Call, mutation: Option<Mutation>) -> bool {
        match call {
            Call::Take { container, place } => {
                self.leases[container] = Some(Lease { place, init: false });
                self.stop_awaiting(container);
            }
            Call::AwaitNoMore(container) => self.stop_awaiting(container),
            Call::Remove(container) => self.leases[container] = None,
            Call::BeginMig => self.under_way = true,
            Call::MarkUnneeded(order) => {
                if let Some(container) = order.filter(|_| mutation != Some(Mutation::AwaitFailed)) {
                    self.stop_awaiting(container);
                }
                self.mark_unneeded(mutation);
            }
            Call::Record { place, awaited } => self.instances[place] = Some(DynamicInstance::new(awaited)),
            Call::NoteGi(place) => self.note(place, |instance| instance.gi = true),
            Call::NoteUuid(place) => self.note(place, |instance| instance.uuid = true),
            // Its compute instance tells its UUID.
            Call::NoteSeen { place, compute } => self.note(place, |instance| {
                (instance.gi, instance.emptied) = (true, true);
                instance.uuid |= compute;
            }),
            Call::ForgetDestroyed(place) => {
                self.instances[place] = None;
                return mutation != Some(Mutation::ForgetQuietly);
            }
            Call::EndMig { changed } => {
                self.under_way = false;
                return changed;
            }
            Call::Reclaim
            | Call::TakeNone(_)
            | Call::LayoutChanged(_)
            | Call::MigBusy
            | Call::NoteGoing(_) => {}
        }
        false
    }

    fn note(&mut self, place: usize, note: impl FnOnce(&mut DynamicInstance)) {
        if let Some(instance) = &mut self.instances[place] {
            note(instance);
        }
    }

    /// `Ledger::mark_unneeded_for_removal`.
    fn mark_unneeded(&mut self, mutation: Option<Mutation>) {
        for place in 0..PLACES {
            let unneeded = self.is_unneeded(place, mutation);
            self.note(place, |instance| instance.going |= unneeded);
        }
    }

    /// `Ledger::needs`, of the instance at `place`.
    #[must_use]
    pub fn needs(&self, place: usize, mutation: Option<Mutation>) -> bool {
        let Some(instance) = self.instances[place] else { return false };
        let known = instance.uuid || mutation != Some(Mutation::NeedByUuid);
        let leased = known && self.is_leased(place) && mutation != Some(Mutation::DestroyLeased);
        leased || instance.awaited.is_some()
    }

    fn is_unneeded(&self, place: usize, mutation: Option<Mutation>) -> bool {
        self.instances[place].is_some() && !self.needs(place, mutation)
    }

    /// `Ledger::has_unneeded`.
    #[must_use]
    pub fn has_unneeded(&self, mutation: Option<Mutation>) -> bool {
        (0..PLACES).any(|place| self.is_unneeded(place, mutation))
    }

    /// Whether there is a lease on the instance at `place`.
    #[must_use]
    pub fn is_leased(&self, place: usize) -> bool {
        self.leases.iter().flatten().any(|lease| lease.place == place)
    }

    /// Whether an instance is kept for `container`.
    #[must_use]
    pub fn is_kept_for(&self, container: usize) -> bool {
        self.instances.iter().flatten().any(|instance| instance.awaited == Some(container))
    }

    /// `Ledger::stop_awaiting`.
    pub(super) fn stop_awaiting(&mut self, container: usize) {
        for instance in self.instances.iter_mut().flatten() {
            instance.awaited = instance.awaited.filter(|awaited| *awaited != container);
        }
    }

    /// `Ledger::kept_from`.
    #[must_use]
    pub fn is_kept_from(&self, container: usize, place: usize, mutation: Option<Mutation>) -> bool {
        let Some(instance) = self.instances[place] else { return false };
        let going = instance.going && mutation != Some(Mutation::LeaseGoing);
        going || instance.awaited.map_or(!instance.uuid, |awaited| awaited != container)
    }
}
