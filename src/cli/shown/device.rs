//! A GPU or a MIG device, as far as both are the same.

use crate::status::{DeviceUsed, Gpu, MigInstance, Room};

/// What is shown of a device.
#[derive(Clone, Debug)]
pub struct Device<'a> {
    pub gpu: &'a Gpu,
    /// `None`: it is the GPU itself.
    pub part: Option<&'a MigInstance>,
    pub uuid: &'a str,
    /// `0`, or `0:2`.
    pub number: String,
    /// The GPU's, or the profile.
    pub name: &'a str,
    pub mode: &'static str,
    pub memory_bytes: u64,
    pub booked: Room,
    pub used: Option<&'a DeviceUsed>,
    /// Why the driver reports no use.
    pub unknown: Option<&'a str>,
    pub lease_count: usize,
    pub drained: bool,
}

impl<'a> Device<'a> {
    /// GPUs, each with its MIG devices.
    pub fn all(gpus: &'a [Gpu]) -> impl Iterator<Item = Self> {
        gpus.iter().flat_map(|gpu| std::iter::once(Self::of(gpu)).chain(Self::parts(gpu)))
    }

    /// The GPU itself.
    pub fn of(gpu: &'a Gpu) -> Self {
        Self {
            gpu,
            part: None,
            uuid: &gpu.uuid,
            number: gpu.index.to_string(),
            name: &gpu.name,
            mode: gpu.mode,
            memory_bytes: gpu.memory_bytes,
            booked: gpu.booked,
            used: gpu.used.as_ref(),
            unknown: gpu.unknown.as_deref(),
            lease_count: gpu.lease_count,
            drained: gpu.drained,
        }
    }

    /// The MIG devices of `gpu`.
    pub fn parts(gpu: &'a Gpu) -> impl Iterator<Item = Self> {
        gpu.mig.iter().map(move |part| Self {
            gpu,
            part: Some(part),
            uuid: &part.uuid,
            number: part.number.clone(),
            name: &part.profile,
            mode: part.mode,
            memory_bytes: part.memory_bytes,
            booked: part.booked,
            used: part.used.as_ref(),
            unknown: part.unknown.as_deref(),
            lease_count: part.lease_count,
            drained: part.drained,
        })
    }

    /// What is booked. Of a GPU in MIG mode that belongs to its MIG devices.
    pub fn own_bookings(&self) -> Option<Room> {
        (self.part.is_some() || self.mode != "mig").then_some(self.booked)
    }

    /// What stands before its number below its GPU.
    pub fn branch(&self, utf8: bool) -> &'static str {
        let is_last = |part: &MigInstance| self.gpu.mig.last().is_some_and(|last| last.uuid == part.uuid);
        match (self.part.map(is_last), utf8) {
            (None, _) => "",
            (Some(false), true) => "├ ",
            (Some(true), true) => "└ ",
            (Some(false), false) => "|-",
            (Some(true), false) => "`-",
        }
    }

    /// The compute instance that shows the memory of both: the first of the GPU instance, which has it.
    pub fn memory_with(&self) -> Option<&'a String> {
        self.part?.shares_memory_with.first().filter(|first| order(first) < order(&self.number))
    }

    /// Its mode, or `instead` of it, and whether it is drained.
    pub fn state(&self, instead: Option<&str>) -> String {
        let mode = instead.unwrap_or(self.mode);
        if self.drained { format!("{mode}, drained") } else { mode.to_owned() }
    }

    /// Used memory, a part of 1.
    pub fn memory_used(&self) -> Option<f64> {
        Some(fraction(self.used?.memory_bytes?, self.memory_bytes))
    }

    /// What it computes in percent: of its SMs (GPM) where the driver tells that alone, as on a MIG device.
    pub fn load(&self) -> Option<f64> {
        let used = self.used?;
        used.busy_percent.map(f64::from).or(used.sm_percent)
    }
}

/// `0:10` comes after `0:2`.
pub fn order(number: &str) -> (u32, u32) {
    let parse = |part: Option<&str>| part.and_then(|part| part.parse().ok()).unwrap_or(0);
    let mut parts = number.split(':');
    (parse(parts.next()), parse(parts.next()))
}

/// `part` of `whole`.
#[expect(clippy::cast_precision_loss, reason = "for a bar")]
pub fn fraction(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}
