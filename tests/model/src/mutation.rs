//! Steps that are broken on purpose.

/// One step that does something else than the code. Every invariant has at least one that breaks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// `take_lease` looks for room in a ledger that it read, and books later, under another lock.
    BookWithoutLooking,
    /// Placement does not ask for what a device is used.
    MixUses,
    /// `reclaim` and `end` free a lease when the first process has ended, without a look at the cgroup.
    FreeBeforeEmpty,
    /// `mps stop` does not look under the ledger's lock whether a lease is left.
    StopWithoutLooking,
    /// `make_ready` takes a daemon that is being stopped for one that serves.
    TrustStopping,
    /// `make_ready` leaves the limits as they are.
    RaiseAfterStart,
    /// `adjust` records the new limits before the daemon has them.
    RecordBeforeAdjust,
    /// `adjust` does not look under the ledger's lock whether the record still is of a daemon that serves.
    AdjustAnyRecord,
    /// `settle` and `heal` leave limits that are higher than needed.
    NeverLower,
    /// `heal` does not start daemons that crashed.
    NeverHeal,
    /// The compute mode is set before the mode that was found is recorded.
    SetModeBeforeRecord,
    /// A daemon waits for the next lease though the `sublet serve` that would end it was killed.
    TrustDeadKeeper,
    /// `take_lease` does not reclaim before it looks.
    LookWithoutReclaim,
    /// A waiter looks once, and then waits to be told.
    LookOnce,
    /// `take_lease` takes what is free, whoever waits longer.
    PassWaiters,
    /// `reclaim` keeps the places of processes that were killed.
    KeepDeadWaiters,
    /// `mig make` records an instance once the driver has created it.
    RecordAfterCreate,
    /// `mig clear` forgets an instance before it destroys it.
    ForgetBeforeDestroy,
    /// `mig clear` does not ask for leases.
    DestroyLeased,
    /// `mig clear` finds leases by UUID alone, which may not be recorded.
    NeedByUuid,
    /// An instance that is being destroyed takes a lease.
    LeaseGoing,
    /// An instance is kept for a shim that was killed.
    AwaitDead,
    /// `mig make` keeps what an earlier attempt for the same lease left.
    AwaitFailed,
    /// Inventories are out of date only when a change has ended, not when an instance was destroyed.
    ForgetQuietly,
    /// A lease is taken by an inventory from before the last change of instances.
    TrustOldInventory,
    /// `suspend` says that a container is suspended before its memory is out.
    FreeBeforeOut,
    /// `resume` restores, and then books.
    BookAfterRestore,
    /// `resume` does not ask NVML for free memory.
    TrustBookings,
    /// No command takes over a step whose process was killed.
    LeaveCutShort,
    /// `sublet serve` alone remembers whom it has suspended for another.
    RememberOnDemand,
    /// A command does not wait for a driver call of a child whose parent was killed.
    CallBesideOrphan,
    /// `move` gives the room on the old GPU away before the state is on the new one.
    MoveWithOneRoom,
    /// The next command takes what moves for being where it was.
    PlaceByLedger,
    /// `move` says that it is done before the old GPU's node is taken away.
    NodesAfterNote,
}
