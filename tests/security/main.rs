//! Attacks, by row of tests/security/defences.

mod cases;
mod damaged_state;
mod elsewhere;
mod engines;
mod first_thread;
mod full_disk;
mod hostile;
mod kill;
mod left;
mod links;
mod programs;
mod stdin;
#[path = "../e2e/two_users/mod.rs"]
mod two_users;
mod untrusted_input;
mod users;
