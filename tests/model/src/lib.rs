//! The protocol as a model: what processes do with the ledger, the daemons' locks, MPS daemons and MIG instances, step by
//! step, in every order, with a crash of any of them between any two steps. docs/design.md says what is modelled.
//!
//! - [`checker`] visits every state that can be reached, or one of those that are alike, and checks the invariants there.
//! - [`ledger`] is the ledger of the [`daemons`] model, and every change of it that the code makes ([`ledger::Call`]).
//! - [`daemons`]: leases, MPS daemons, their limits and compute modes, a waiter, `sublet serve`, the next command.
//! - [`dynamic_mig`]: instances that are created for a container and destroyed after it, with a ledger of its own
//!   ([`dynamic_mig::Call`]).
//! - [`suspending`]: suspended containers, with a lease of its own; and [`moving`].
//!
//! `src/core/replay` applies the same calls to the real ledger, and `src/cli/mig/making_instances_replay.rs` compares what
//! `sublet mig make` and `clear` do.
//!
//! Names of states and steps are the code's. A [`Mutation`] breaks one step, to show that the invariants can fail.
//!
//! The checker is our own. stateright 0.31, which does the same, has no feature that leaves out its web server: it
//! brings 42 crates, among them hashbrown 0.14 (through dashmap), a third version beside the two that deny.toml allows.

pub mod checker;
pub mod daemons;
pub mod dynamic_mig;
pub mod ledger;
pub mod moving;
pub mod suspending;

mod mutation;

pub use mutation::Mutation;
