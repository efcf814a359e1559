//! Docker below a dockerd of the tests' own, and what concerns several engines.

mod bench_docker;
mod cdi;
mod demo_shell;
mod docker;
mod docker_killed;
mod docker_suspended;
mod doctor;
mod explained;
mod mapped;
mod mig_engines;
mod recipes;
mod retry;
mod rootless_docker;
mod setup;
mod swarm;
