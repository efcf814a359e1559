//! A lease in words: its container, its limits, and what it uses.

use serde::Serialize;

use super::device::{Device, fraction};
use crate::status::{LeaseOnDevice, Status};
use sublet_core::share::Mode;
use sublet_core::text::{LONGEST_NAME, safe, short_id};

/// What people call the container: its name; its service or unit where it has none; else its id.
pub fn called(lease: &LeaseOnDevice) -> String {
    let names = [&lease.name, &lease.part_of, &lease.unit];
    names.into_iter().flatten().next().map_or_else(|| short_id(&lease.called), |name| cut(name))
}

/// No longer than [`LONGEST_NAME`], and safe to print.
pub fn cut(name: &str) -> String {
    safe(&name.chars().take(LONGEST_NAME).collect::<String>())
}

/// The mode, with what of the device is the container's alone.
pub fn mode(lease: &LeaseOnDevice, status: &Status) -> String {
    let mut parts = status.devices.iter().flat_map(|gpu| &gpu.mig);
    match lease.mode {
        Mode::Mig => parts
            .find(|part| part.uuid == lease.device)
            .map_or_else(|| "mig".to_owned(), |part| format!("mig {}", part.profile)),
        mode if lease.own_server => format!("{mode}, own MPS"),
        mode => mode.to_string(),
    }
}

/// What a container without a limit may have: all of a device that nobody shares with it, else as much as it takes.
pub fn whole(lease: &LeaseOnDevice) -> String {
    let is_alone = matches!(lease.mode, Mode::Exclusive | Mode::Mig);
    if is_alone { "all".to_owned() } else { "no limit".to_owned() }
}

/// Used memory and its limit.
pub fn memory(lease: &LeaseOnDevice) -> String {
    let used = lease.used.memory_bytes.map_or_else(|| "-".to_owned(), super::memory);
    format!("{used} / {}", lease.memory_bytes.map_or_else(|| whole(lease), super::memory))
}

/// What it computes. The driver tells only what a shared MPS server's containers compute together.
pub fn busy(lease: &LeaseOnDevice) -> String {
    match (lease.used.sm_percent, lease.used.server_sm_percent) {
        (Some(own), _) => format!("{own} %"),
        (None, Some(all)) => format!("n/a of {all} %"),
        (None, None) => "-".to_owned(),
    }
}

/// How much of its memory limit it uses, a part of 1; without a limit, of all of the device.
pub fn memory_used(lease: &LeaseOnDevice, status: &Status) -> Option<f64> {
    let of_device = || Device::all(&status.devices).find(|device| device.uuid == lease.device);
    let whole = lease.memory_bytes.or_else(|| of_device().map(|device| device.memory_bytes));
    Some(fraction(lease.used.memory_bytes?, whole?))
}

/// A container on a device, as tables and the page of `sublet top` show it.
#[derive(Serialize)]
pub struct Words {
    pub name: String,
    pub gpu: String,
    pub mode: String,
    pub sm: String,
    pub busy: String,
    /// Of the limit, a part of 1.
    pub memory_used: Option<f64>,
    pub memory: String,
    pub processes: String,
    pub user: String,
    pub image: String,
    pub state: String,
}

impl Words {
    /// Of the image's name, its last `longest` characters: its tag stands at its end.
    pub fn of(lease: &LeaseOnDevice, status: &Status, longest: usize) -> Self {
        let image = lease.image.as_deref().map(|image| super::end_of(&safe(image), longest));
        Self {
            name: called(lease),
            gpu: safe(&status.number(&lease.device)),
            mode: mode(lease, status),
            sm: lease.sm_percent.map_or_else(|| whole(lease), |percent| format!("{percent} %")),
            busy: busy(lease),
            memory_used: memory_used(lease, status),
            memory: memory(lease),
            processes: lease.used.processes.map_or_else(|| "-".to_owned(), |count| count.to_string()),
            user: cut(&lease.user),
            image: image.unwrap_or_else(|| "-".to_owned()),
            state: super::word(&lease.state),
        }
    }
}
