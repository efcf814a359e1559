//! Which states are alike: containers that ask for the same can be exchanged, and some of what a state has is for nobody.
//!
//! Devices cannot be exchanged, because a round comes to the first one first.

use super::{Actor, Daemons, Pc, State};
use crate::checker::Alike;
use crate::ledger::{CONTAINERS, DEVICES, LeaseState, Life, Owner};

/// By a container's number, its new one.
pub type Names = [usize; CONTAINERS];

impl Alike for Daemons {
    type Names = Names;

    fn names(&self) -> Vec<Names> {
        let asks = |container: usize| (self.shares.get(container), self.waiters.contains(&container));
        let mut all = vec![[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        all.retain(|names: &Names| {
            (0..CONTAINERS).all(|container| asks(container) == asks(names[container]))
        });
        all
    }

    fn forgotten(&self, state: &State) -> State {
        let mut state = *state;
        for container in 0..CONTAINERS {
            let off = state.shims[container] == Pc::Off;
            // A container without a record has ended, or was never created.
            let life = &mut state.lives[container];
            if off && !state.records[container] && *life == Life::Gone {
                *life = Life::Never;
            }
            let Some(lease) = &mut state.ledger.leases[container] else { continue };
            // No change of the model's depends on it.
            lease.state = LeaseState::Active;
            // Whoever it is, it does not run. The next one to delete the container becomes the owner.
            if lease.init && off && state.deletes[container] == Pc::Off {
                lease.owner = Owner::Shim;
            }
        }
        for device in 0..DEVICES {
            let here = |container: usize| {
                let lease = state.ledger.leases[container];
                lease.is_some_and(|lease| usize::from(lease.device) == device)
            };
            let used = (0..CONTAINERS).any(|container| {
                let runs = state.lives[container] == Life::Running;
                here(container) && (runs || state.shims[container] == Pc::RuntimeCreates)
            });
            // Whoever comes to use the daemon asks first whether it serves.
            state.gpus[device].lost &= used;
        }
        state
    }

    fn renamed(&self, state: &State, names: &Names) -> State {
        let mut ledger = state.ledger;
        ledger.leases = renamed(ledger.leases, names);
        ledger.waiting = renamed(ledger.waiting, names);
        let mut locks = state.locks;
        for holder in locks.iter_mut().flatten() {
            holder.by = holder.by.map(|who| match who {
                Actor::Shim(container) => Actor::Shim(names[container]),
                Actor::Delete(container) => Actor::Delete(names[container]),
                who => who,
            });
        }
        State {
            ledger,
            locks,
            shims: renamed(state.shims, names),
            deletes: renamed(state.deletes, names),
            lives: renamed(state.lives, names),
            records: renamed(state.records, names),
            asked: renamed(state.asked, names),
            excused: renamed(state.excused, names),
            ..*state
        }
    }
}

fn renamed<T: Copy>(old: [T; CONTAINERS], names: &Names) -> [T; CONTAINERS] {
    let mut new = old;
    for (value, name) in old.into_iter().zip(names) {
        new[*name] = value;
    }
    new
}
