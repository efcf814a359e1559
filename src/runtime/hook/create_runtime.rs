//! `createRuntime`: the container exists and has not started. Binds the lease that precreate took.

use super::HookError;
use super::container_state::State;
use crate::shim;
use sublet_core::admit::{self, Leases};
use sublet_core::config_files;
use sublet_core::ledger::{Binding, Init, LeaseId};
use sublet_core::process::Process;
use sublet_core::process::confine;

/// Binds `lease` to the container of `state`. A failure keeps the container from starting, because without a lease its
/// GPU use would not be booked.
pub(super) fn bind(state: &State, lease: &LeaseId) -> Result<(), HookError> {
    let config = config_files::load()?;
    let binding = read_binding(state)?;
    Leases::of(&config).bind(lease, &binding).map_err(|source| {
        admit::clear_refused(&binding.bundle, &config);
        HookError::Bind { id: super::safe_id(state), source }
    })
}

fn read_binding(state: &State) -> Result<Binding, HookError> {
    let pid = state.pid.filter(|pid| *pid > 0).ok_or_else(|| HookError::NoPid(super::safe_id(state)))?;
    let process = Process::find(pid).filter(Process::is_alive);
    let process = process.ok_or_else(|| HookError::NoPid(super::safe_id(state)))?;
    let bundle = state.bundle.as_ref().and_then(|bundle| bundle.canonicalize().ok());
    let bundle = bundle.ok_or_else(|| HookError::NoBundle(super::safe_id(state)))?;
    let record = shim::find_record(confine::engine(), &state.id);
    let init =
        Init::of(process).map_err(|source| HookError::NoCgroup { id: super::safe_id(state), source })?;
    Ok(Binding { id: state.id.clone(), bundle, record: record.unwrap_or_default(), init })
}
