//! Below a systemd of their own.

mod daemon_reload;
mod maintenance;
mod mig_boot;
mod quadlet;
mod reboot;
mod systemd;
