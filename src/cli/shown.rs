//! How values, devices and leases are written for people, in tables and in `sublet top`.

use clap::ValueEnum;
use serde::Serialize;

use crate::names::Owner;
use crate::status::{DeviceUsed, Gpu, LeaseOnDevice, MigInstance, Room, Status};
use sublet_core::share::Mode;
pub use sublet_core::text::cut;
use sublet_core::text::{safe, safe_long, short_id};

/// Used, booked and free; where the terminal shows no UTF-8, the second.
const MARKS: [[char; 3]; 2] = [['█', '▒', '·'], ['#', '=', '.']];

/// Memory as `8 GiB`, `1.5 GiB`, `512 MiB`: exact if that is short, otherwise rounded to a tenth.
pub fn memory(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    if bytes < GIB {
        return format!("{} MiB", bytes >> 20);
    }
    if bytes % GIB == 0 {
        return format!("{} GiB", bytes / GIB);
    }
    let tenths = bytes / (GIB / 10);
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

/// The memory of a lease, or `unlimited` if it has no limit.
pub fn memory_limit(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unlimited".to_owned(), memory)
}

/// The time since `since`, such as `3m 20s`.
pub fn ago(since: u64) -> String {
    let seconds = sublet_core::process::epoch_seconds().saturating_sub(since);
    humantime::format_duration(std::time::Duration::from_secs(seconds)).to_string()
}

/// The last `longest` characters of `text`, with an ellipsis where something is cut off before them.
pub fn end_of(text: &str, longest: usize) -> String {
    let length = text.chars().count();
    if length <= longest {
        return text.to_owned();
    }
    let end: String = text.chars().skip(length + 1 - longest).collect();
    format!("…{end}")
}

/// `text`, safe to print and not cut.
pub fn escaped(text: &str) -> String {
    safe_long(text, usize::MAX)
}

/// The word that stands for `value` on the command line.
pub fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// The word that stands for `value` in JSON.
pub fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

/// The value, or a dash for none.
pub fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// A bar of `width` characters: the used part, then the booked and unused part, then the rest. Both are fractions of 1.
/// `None` is unknown, and is shown as empty.
pub fn bar(used: Option<f64>, booked: Option<f64>, width: usize, utf8: bool) -> String {
    let [full, half, empty] = MARKS[usize::from(!utf8)];
    let [used, booked] = [used, booked].map(|part| characters(part.unwrap_or_default(), width));
    let mark = |at| match () {
        () if at < used => full,
        () if at < booked => half,
        () => empty,
    };
    (0..width).map(mark).collect()
}

/// The nearest number of characters; a part that is not nothing has at least one.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to `width`")]
fn characters(part: f64, width: usize) -> usize {
    let exact = part.clamp(0.0, 1.0) * float(width as u64);
    if exact > 0.0 { (exact.round() as usize).max(1) } else { 0 }
}

/// A GPU or a MIG device for tables, as far as both are the same.
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

    /// Its bookings. The bookings of a GPU in MIG mode belong to its MIG devices.
    pub fn own_bookings(&self) -> Option<Room> {
        (self.part.is_some() || self.mode != "mig").then_some(self.booked)
    }

    /// The branch before its number below its GPU.
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

    /// Its mode, or what keeps it from being served, and whether it is drained.
    pub fn state(&self) -> String {
        let obstacle = match self.part {
            None => Some(self.gpu.health.state).filter(|state| *state != "ok").map(str::to_uppercase),
            Some(part) => part.fault.as_ref().map(|_| "unusable".to_owned()),
        };
        let state = obstacle.unwrap_or_else(|| self.mode.to_owned());
        if self.drained { state + ", drained" } else { state }
    }

    /// By whom it is drained, since when, until when and why: safe to print.
    pub fn drain(&self) -> Option<&'a str> {
        self.part.map_or(&self.gpu.drain, |part| &part.drain).as_deref()
    }

    /// Used memory, a part of 1.
    pub fn memory_used(&self) -> Option<f64> {
        Some(fraction(self.used?.memory_bytes?, self.memory_bytes))
    }

    /// Its load in percent: of its SMs (GPM) where the driver tells that alone, as on a MIG device.
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
pub fn fraction(part: u64, whole: u64) -> f64 {
    float(part) / float(whole.max(1))
}

/// For display, and for computing with measured numbers.
#[expect(clippy::cast_precision_loss, reason = "exact up to 2^53")]
pub fn float(number: u64) -> f64 {
    number as f64
}

// A lease in words: its container, its limits, and what it uses.

/// A container for people: its name; its service or unit where it has none; else its id.
pub fn called(lease: &LeaseOnDevice) -> String {
    let names = [&lease.name, &lease.part_of, &lease.unit];
    names.into_iter().flatten().next().map_or_else(|| short_id(&lease.called), |name| cut(name))
}

/// How a container shares its device: with what of the device, the MIG device's `profile`, is its own.
pub fn sharing(mode: Mode, profile: Option<&str>, own_server: bool) -> String {
    match (mode, profile) {
        (Mode::Mig, Some(profile)) => format!("mig {profile}"),
        (mode, _) if own_server => format!("{mode}, own MPS"),
        (mode, _) => mode.to_string(),
    }
}

/// The number of the device `uuid`. Of one that this host no longer has, the UUID would widen a table.
pub fn number_of(uuid: &str, status: &Status) -> String {
    let number = status.number(uuid);
    if number == uuid { "gone".to_owned() } else { safe(&number) }
}

/// The memory of a container without a limit: all of a device that nobody shares with it, else as much as it takes.
pub fn whole(lease: &LeaseOnDevice) -> String {
    if matches!(lease.mode, Mode::Exclusive | Mode::Mig) { "all".to_owned() } else { "no limit".to_owned() }
}

/// Used memory and its limit.
pub fn memory_of(lease: &LeaseOnDevice) -> String {
    let used = or_dash(lease.used.memory_bytes.map(memory));
    format!("{used} / {}", lease.memory_bytes.map_or_else(|| whole(lease), memory))
}

/// Its load. The driver reports only the joint load of a shared MPS server's containers.
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
    /// Empty: nothing says it.
    pub owner: String,
    pub image: String,
    pub state: String,
}

impl Words {
    /// Of the image's name, its last `longest` characters: its tag stands at its end.
    pub fn of(lease: &LeaseOnDevice, status: &Status, longest: usize) -> Self {
        let part = status.devices.iter().flat_map(|gpu| &gpu.mig).find(|part| part.uuid == lease.device);
        Self {
            name: called(lease),
            gpu: number_of(&lease.device, status),
            mode: sharing(lease.mode, part.map(|part| part.profile.as_str()), lease.own_server),
            sm: lease.sm_percent.map_or_else(|| whole(lease), |percent| format!("{percent} %")),
            busy: busy(lease),
            memory_used: memory_used(lease, status),
            memory: memory_of(lease),
            processes: or_dash(lease.used.processes),
            user: cut(&lease.user),
            owner: lease.owner.as_ref().map(Owner::words).unwrap_or_default(),
            image: or_dash(lease.image.as_deref().map(|image| end_of(&safe(image), longest))),
            state: word(&lease.state),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_show_the_used_and_the_booked_part() {
        let shown = |used, booked| bar(used, booked, 10, false);
        assert_eq!(shown(Some(0.3), Some(0.5)), "###==.....");
        assert_eq!(shown(Some(0.7), Some(0.5)), "#######...", "more than is booked");
        assert_eq!(shown(None, Some(1.0)), "==========");
        assert_eq!(shown(Some(0.001), None), "#.........", "a little is not nothing");
        assert_eq!(shown(Some(7.0), Some(f64::NAN)), "##########");
        assert_eq!(bar(Some(0.5), Some(0.75), 4, true), "██▒·");
        assert_eq!(bar(Some(0.5), None, 0, true), "");
    }

    #[test]
    fn memory_reads_as_people_write_it() {
        let shown = [512 << 20, 8 << 30, 1536 << 20, 143_155 << 20].map(memory);
        assert_eq!(shown, ["512 MiB", "8 GiB", "1.5 GiB", "139.7 GiB"]);
        assert_eq!(memory_limit(None), "unlimited");
    }
}
