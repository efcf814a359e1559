//! Podman, of root and of users without it.

mod bench_podman;
mod podman;
mod podman_killed;
mod podman_suspended;
mod podman_users;
mod rootless;
