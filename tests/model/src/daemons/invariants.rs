//! What holds in every state.

use super::{Daemons, Pc, State};
use crate::ledger::{Life, Limits, MEMORY, SM, Share};

/// The invariant that `state` breaks.
pub(super) fn broken(model: &Daemons, state: &State) -> Option<&'static str> {
    state.wrong.or_else(|| unleased(state)).or_else(|| {
        (0..model.devices)
            .find_map(|device| accounts(model, state, device).or_else(|| unserved(model, state, device)))
    })
}

/// A lease is not freed while its container lives.
fn unleased(state: &State) -> Option<&'static str> {
    let lives = |life: Life| matches!(life, Life::Running | Life::FirstGone);
    let without =
        state.lives.iter().zip(&state.ledger.leases).any(|(life, lease)| lives(*life) && lease.is_none());
    without.then_some("a lease stays while its container lives")
}

/// What is booked stays within the device, which has one use.
fn accounts(model: &Daemons, state: &State, device: usize) -> Option<&'static str> {
    let (mut sms, mut memories, mut shared, mut alone) = (0, 0, 0, 0);
    for share in state.ledger.on(device, &model.shares) {
        match share {
            Share::Mps { sm, memory } => {
                (sms, memories, shared) = (sms + sm, memories + memory.unwrap_or(0), shared + 1);
            }
            Share::Exclusive => alone += 1,
        }
    }
    if sms > SM {
        return Some("no more SMs are booked than there are");
    }
    if memories > MEMORY {
        return Some("no more memory is booked than there is");
    }
    (alone > 1 || alone > 0 && shared > 0).then_some("a device has one use")
}

/// A running container keeps its daemon, with at least its limits; the ledger never says more than is in force.
fn unserved(model: &Daemons, state: &State, device: usize) -> Option<&'static str> {
    let gpu = state.gpus[device];
    let running = (0..model.shares.len()).filter(|container| {
        let lease = state.ledger.leases[*container];
        let here = lease.is_some_and(|lease| usize::from(lease.device) == device);
        state.lives[*container] == Life::Running && here && model.shares[*container].is_mps()
    });
    let needed = running.map(|container| model.shares[container].limits()).reduce(Limits::or);
    match (gpu.daemon, needed) {
        (None, Some(_)) if !gpu.lost && !excused(state, device) => {
            return Some("a daemon is not stopped under a container");
        }
        (Some(limits), Some(needed)) if !limits.admits(needed) => {
            return Some("limits are never below those of a container that runs");
        }
        _ => {}
    }
    let recorded = state.ledger.daemons[device].filter(|daemon| daemon.process).map(|daemon| daemon.limits);
    match (gpu.daemon, recorded) {
        (Some(limits), Some(recorded)) if !limits.admits(recorded) => {
            Some("the ledger never says more than is in force")
        }
        _ => None,
    }
}

fn excused(state: &State, device: usize) -> bool {
    let on = |container: usize| {
        state.ledger.leases[container].is_some_and(|lease| usize::from(lease.device) == device)
    };
    (0..state.excused.len()).any(|container| state.excused[container] && on(container))
}

/// What is left that should not be, after a command that ran alone.
pub(super) fn unsettled(model: &Daemons, state: &State) -> Option<&'static str> {
    let ended = |life: Life| matches!(life, Life::Never | Life::Gone);
    let stays =
        state.lives.iter().zip(&state.ledger.leases).any(|(life, lease)| ended(*life) && lease.is_some());
    if stays {
        return Some("after a command, no lease is left of a container that has ended");
    }
    (0..model.devices).find_map(|device| unsettled_device(model, state, device))
}

fn unsettled_device(model: &Daemons, state: &State, device: usize) -> Option<&'static str> {
    let (gpu, recorded) = (state.gpus[device], state.ledger.daemons[device]);
    if gpu.exclusive != state.ledger.compute_modes[device] {
        return Some("after a command, a changed compute mode is recorded");
    }
    let Some(wanted) = state.ledger.wanted(device, &model.shares) else {
        let waits = state.serve == Pc::Idle && state.ledger.keeper;
        if (recorded.is_some() || gpu.daemon.is_some()) && !waits {
            return Some("after a command, no daemon is left without a lease");
        }
        return gpu.exclusive.then_some("after a command, no compute mode is left changed without a lease");
    };
    let serves = recorded.filter(|daemon| daemon.process && daemon.answered && state.is_up(device));
    match (serves, gpu.daemon) {
        (Some(daemon), Some(limits)) if daemon.limits == limits && limits == wanted => None,
        (Some(_), Some(_)) => Some("after a command, limits are those of the largest share"),
        // A shim was killed before its container's daemon was started: the container starts with it, or never.
        _ if recorded.is_none() => None,
        _ => Some("after a command, every lease has its daemon"),
    }
}
