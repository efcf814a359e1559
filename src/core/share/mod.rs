//! The values with which a share is requested and configured: modes, selectors, percentages and amounts of memory, kept
//! exact. They do not depend on where they were written.

mod selector;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(crate) use selector::{SELECTORS_ALLOWED, glob_matches, parse_devices};

/// The most that `[limits] wait_max` may be.
pub const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// `sublet.gpu`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Devices {
    /// This many devices, whichever they are.
    Any(std::num::NonZeroU32),
    /// Every device of the host.
    All,
    /// These devices, all or none of them.
    These(Vec<Selector>),
}

/// One device as a user names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Selector {
    /// NVML's index.
    Index(u32),
    /// `GPU-…`, whole or an unambiguous beginning.
    Uuid(String),
    /// A PCI bus id, in any of the usual widths.
    BusId(String),
    /// `MIG-…`, also in the old form `MIG-GPU-<uuid>/<gi>/<ci>`.
    MigUuid(String),
    /// `G:M`: the M-th MIG device of GPU index G.
    MigIndex(u32, u32),
    /// `name:<alias>` from `[[device]]`.
    Name(String),
    /// `model:<glob>` on the device's name. Any one device that matches.
    Model(String),
}

/// How a device is shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Mode {
    /// The driver's round robin. With a memory limit, the container also has a dedicated MPS server.
    #[default]
    TimeSlice,
    /// CUDA Multi-Process Service.
    Mps,
    /// A MIG instance.
    Mig,
    /// The whole device for one container.
    Exclusive,
}

/// `sublet.isolation`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Isolation {
    /// The device's shared MPS server. It costs little, but a fault in one client ends all of them.
    #[default]
    Shared,
    /// An MPS server for this container only. Its faults do not reach other containers, and servers take turns.
    Dedicated,
}

/// `sublet.priority`: MPS client priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Priority {
    /// `CUDA_MPS_CLIENT_PRIORITY=0`.
    #[default]
    Normal,
    /// `CUDA_MPS_CLIENT_PRIORITY=1`.
    Low,
}

/// `sublet.suspend`: whether the container's GPU state may be put into host memory while other containers use the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Suspend {
    /// It may not.
    #[default]
    Never,
    /// It may, while it has one CUDA process.
    Allow,
    /// It may, with several CUDA processes: they share no GPU memory with each other.
    AllowMany,
}

impl Suspend {
    /// Whether it may not. A share that may be suspended has no MPS server.
    pub fn is_never(&self) -> bool {
        *self == Self::Never
    }
}

/// `sublet.guard`: the guard's action on a container's own processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guarding {
    /// Set by the container: the stricter of this and `[guard]`.
    AtLeast(Action),
    /// Set by a `[share]` of the configuration, and so by root: this applies instead of `[guard]`.
    Exactly(Action),
}

impl Guarding {
    /// The action if `[guard]` says `configured`.
    pub fn over(self, configured: Action) -> Action {
        match self {
            Self::AtLeast(action) => action.max(configured),
            Self::Exactly(action) => action,
        }
    }
}

/// `sublet.mig-caps`: access beyond the container's own MIG device (MIG User Guide, "Device nodes and capabilities").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum MigCapability {
    /// Monitoring all instances of all GPUs.
    Monitor,
    /// Creating and destroying instances.
    Config,
}

/// One class of driver files, as `NVIDIA_DRIVER_CAPABILITIES` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Capability {
    /// CUDA and `OpenCL`.
    Compute,
    /// NVML and nvidia-smi.
    Utility,
    /// OpenGL, EGL, Vulkan, with nvidia-modeset and the GPU's own /dev/dri nodes.
    Graphics,
    /// Video codecs and optical flow.
    Video,
}

/// A set of [`Capability`], sorted, each one once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities(pub Vec<Capability>);

impl Capabilities {
    /// Whether `capability` is in the set.
    pub fn has(&self, capability: Capability) -> bool {
        self.0.contains(&capability)
    }
}

impl Default for Capabilities {
    /// `compute,utility`.
    fn default() -> Self {
        Self(vec![Capability::Compute, Capability::Utility])
    }
}

/// The guard's action on a process, the mildest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum Action {
    /// It is reported in the journal and in `sublet status`.
    Report,
    /// The process is ended.
    Terminate,
    /// Its container is ended.
    Container,
}

/// The part of `sm` for each of `processes`.
pub(crate) fn sm_of_process(sm: Percent, processes: u32) -> Percent {
    Percent::from_thousandths(sm.thousandths() / processes.max(1))
}

/// The part of `bytes` for each of `processes`, in whole MiB, which is the unit of MPS.
pub fn bytes_of_process(bytes: u64, processes: u32) -> u64 {
    bytes / u64::from(processes.max(1)) / MIB * MIB
}

/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;

/// A percentage in thousandths, so that sums of shares are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Percent(u32);

impl Percent {
    /// 100 %.
    pub const WHOLE: Self = Self(100_000);

    /// From thousandths of a percent.
    pub const fn from_thousandths(thousandths: u32) -> Self {
        Self(thousandths)
    }

    /// The nearest to `percent`. Rounded, because 16.1 times 1000 may be a little less than 16100.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
    pub fn nearest(percent: f64) -> Self {
        Self((percent * 1000.0).round() as u32)
    }

    /// `part` of `all`, rounded up.
    pub fn of_all(part: u32, all: u32) -> Self {
        let thousandths = (u64::from(part) * 100_000).div_ceil(u64::from(all.max(1)));
        Self(u32::try_from(thousandths).unwrap_or(u32::MAX))
    }

    /// In thousandths of a percent.
    pub const fn thousandths(self) -> u32 {
        self.0
    }

    /// As a number, for JSON and for people.
    pub fn as_f64(self) -> f64 {
        f64::from(self.0) / 1000.0
    }

    /// This share of `whole`, rounded down.
    pub fn of(self, whole: u64) -> u64 {
        // For shares up to 100 % the result is at most `whole`, so it fits. Larger ones saturate.
        u64::try_from(u128::from(whole) * u128::from(self.0) / 100_000).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Percent {
    /// As `25` or `12.5`: no sign, no trailing zeros, never an exponent. Both MPS and people can read it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / 1000, self.0 % 1000);
        if part == 0 {
            return f.pad(&whole.to_string());
        }
        f.pad(format!("{whole}.{part:03}").trim_end_matches('0'))
    }
}

/// `sublet.memory`: an amount, or a share of the device's total.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Memory {
    /// In bytes.
    Bytes(u64),
    /// Of the device's total.
    Share(Percent),
}

impl Memory {
    /// In bytes on a device with `total` bytes, rounded down to MiB.
    pub fn on(self, total: u64) -> u64 {
        let bytes = match self {
            Self::Bytes(bytes) => bytes,
            Self::Share(share) => share.of(total),
        };
        bytes / MIB * MIB
    }
}

/// The syntax of [`parse_percent`], for messages.
pub(crate) const PERCENT_ALLOWED: &str = "a percentage over 0 up to 100, such as 25, 25% or 12.5";

/// The syntax of [`parse_memory`], for messages.
pub const MEMORY_ALLOWED: &str =
    "an amount of 1MiB or more with a unit, such as 8GiB or 8192MiB, or a percentage up to 100%, such as 25%";

/// The syntax of [`parse_duration`], for messages.
pub const DURATION_ALLOWED: &str = "0 or a whole number of ms, s or m, such as 10s";

/// `25`, `25%`, `12.5`: over 0, up to 100, at most three decimals.
///
/// # Errors
/// Anything else, with a hint if there is one: the end of a message, such as `write 25GiB, 25MiB or 25%`. A fraction such as `0.25` without `%` is taken for a mistake, because it is less than two SMs on
/// every GPU.
pub fn parse_percent(text: &str) -> Result<Percent, Option<String>> {
    let bare = text.strip_suffix('%');
    let percent = decimal_percent(bare.unwrap_or(text)).ok_or(None)?;
    if bare.is_some() || percent.0 >= 1000 {
        return Ok(percent);
    }
    let amount = match percent.0 {
        250 => "a quarter of".to_owned(),
        500 => "half".to_owned(),
        _ => format!("{percent} of"),
    };
    Err(Some(format!("{amount} a percent? write {}", Percent(percent.0 * 100))))
}

fn decimal_percent(text: &str) -> Option<Percent> {
    // At most three decimals, so that nothing is lost.
    let decimal = Decimal::parse(text).filter(|decimal| decimal.places <= 3)?;
    let percent = Percent(u32::try_from(decimal.times(1000)?).ok()?);
    (percent.0 > 0 && percent <= Percent::WHOLE).then_some(percent)
}

/// `8GiB` = `8GB` = `8G` = `8g` (as `docker -m` has it: powers of 1024), KiB, MiB and TiB likewise,
/// fractions such as `1.5GiB`, or a share of the device such as `25%`.
///
/// # Errors
/// Anything else. Also less than 1 MiB, because amounts are booked in whole MiB, and a bare number, because it could
/// mean GiB, MiB, bytes or percent.
pub fn parse_memory(text: &str) -> Result<Memory, Option<String>> {
    if let Some(share) = text.strip_suffix('%') {
        return decimal_percent(share).map(Memory::Share).ok_or(None);
    }
    if Decimal::parse(text).is_some_and(|number| number.digits != 0) {
        // The text as it is read, and no more than a GPU may have.
        let is_meant = |text: &String| parse_memory(text).is_ok_and(|memory| memory.on(MIB) < 1 << 40);
        let meant = ["GiB", "MiB", "%"].map(|unit| format!("{text}{unit}")).into_iter().filter(is_meant);
        let meant: Vec<_> = meant.collect();
        return Err((!meant.is_empty()).then(|| format!("the unit is missing: write {}", meant.join(" or "))));
    }
    let bytes = parse_bytes(text).filter(|bytes| *bytes >= MIB);
    bytes.map(Memory::Bytes).ok_or_else(|| nearly_memory(text))
}

/// A hint for amounts as other programs write them: `8 GiB`, and Kubernetes' `8Gi`.
fn nearly_memory(text: &str) -> Option<String> {
    if text.len() > 30 {
        return None;
    }
    let squeezed = text.replace(' ', "");
    let meant = if squeezed.ends_with('i') { format!("{squeezed}B") } else { squeezed };
    let is_amount = meant != text && parse_bytes(&meant).is_some_and(|bytes| bytes >= MIB);
    is_amount.then(|| format!("write {meant}"))
}

/// An amount with a unit, converted to bytes and rounded down; `None` for anything else and for more than a `u64`
/// holds.
pub(crate) fn parse_bytes(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic())?);
    let power = match unit.to_ascii_lowercase().as_str() {
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    Decimal::parse(number)?.times(1 << power)
}

/// `0`, `500ms`, `10s`, `2m`, up to `longest`.
///
/// # Errors
/// Anything else; a bare number other than 0. As of [`parse_percent`].
pub fn parse_duration(text: &str, longest: Duration) -> Result<Duration, Option<String>> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number: u64 = number.parse().map_err(|_| None)?;
    let duration = match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => number.checked_mul(60).map(Duration::from_secs),
        "" => return Err(Some(format!("the unit is missing: write {number}s"))),
        _ => None,
    };
    duration.filter(|duration| *duration <= longest).ok_or(None)
}

/// `duration` in the form that [`parse_duration`] reads, rounded down to milliseconds.
pub fn show_duration(duration: Duration) -> String {
    match duration.as_millis() {
        0 => "0".to_owned(),
        millis if millis % 60_000 == 0 => format!("{}m", millis / 60_000),
        millis if millis % 1000 == 0 => format!("{}s", millis / 1000),
        millis => format!("{millis}ms"),
    }
}

/// A number of ASCII digits with at most one point between them, exact.
#[derive(Clone, Copy)]
struct Decimal {
    digits: u64,
    places: u32,
}

impl Decimal {
    /// No sign, no exponent, only ASCII digits, at most nine decimals. The text must be short, because messages repeat
    /// it.
    fn parse(text: &str) -> Option<Self> {
        if text.len() > 30 {
            return None;
        }
        let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(whole) || !is_number(part) || part.len() > 9 {
            return None;
        }
        let part = part.trim_end_matches('0');
        let places = u32::try_from(part.len()).ok()?;
        let whole = whole.parse::<u64>().ok()?.checked_mul(10_u64.pow(places))?;
        Some(Self { digits: whole.checked_add(part.parse().unwrap_or(0))?, places })
    }

    /// Rounded down; `None` if it is more than a `u64` holds.
    fn times(self, factor: u64) -> Option<u64> {
        let product = u128::from(self.digits) * u128::from(factor) / 10_u128.pow(self.places);
        u64::try_from(product).ok()
    }
}

/// `bytes` for people: in whole GiB, otherwise in MiB.
pub(crate) fn show_bytes(bytes: u64) -> String {
    const GIB: u64 = 1024 * MIB;
    if bytes > 0 && bytes % GIB == 0 {
        format!("{} GiB", bytes / GIB)
    } else {
        format!("{} MiB", bytes / MIB)
    }
}

#[cfg(test)]
mod units_tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn percent(text: &str) -> Result<u32, Option<String>> {
        parse_percent(text).map(Percent::thousandths)
    }

    #[test]
    fn percentages_are_exact() {
        assert_eq!(percent("25"), Ok(25_000));
        assert_eq!(percent("25%"), Ok(25_000));
        assert_eq!(percent("12.5"), Ok(12_500));
        assert_eq!(percent("33.333"), Ok(33_333));
        assert_eq!(percent("33.3330000"), Ok(33_333));
        assert_eq!(percent("100"), Ok(100_000));
        assert_eq!(percent("100.000%"), Ok(100_000));
        assert_eq!(percent("1"), Ok(1_000));
        assert_eq!(percent("0.5%"), Ok(500));
    }

    #[test]
    fn refuses_text_that_is_no_percentage() {
        for text in [
            "",
            "%",
            "0",
            "0%",
            "0.000",
            "101",
            "100.001",
            "33.3333",
            "-25",
            "+25",
            "25 ",
            " 25",
            "25%%",
            ".5",
            "25.",
            "1.2.3",
            "1e2",
            "1e309",
            "NaN",
            "inf",
            "٢٥",
            "25\0",
            "25\n",
            "0x19",
            "18446744073709551616",
        ] {
            assert_eq!(percent(text), Err(None), "{text:?}");
        }
    }

    #[test]
    fn knows_a_fraction_that_was_meant_as_a_share() {
        assert_eq!(percent("0.25"), Err(Some("a quarter of a percent? write 25".into())));
        assert_eq!(percent("0.5"), Err(Some("half a percent? write 50".into())));
        assert_eq!(percent("0.125"), Err(Some("0.125 of a percent? write 12.5".into())));
    }

    #[test]
    fn amounts_count_in_powers_of_1024() {
        for text in ["8GiB", "8GB", "8G", "8g", "8gib", "8192MiB", "8388608k", "8388608KB", "0.0078125TiB"] {
            assert_eq!(parse_memory(text), Ok(Memory::Bytes(8_589_934_592)), "{text}");
        }
        assert_eq!(parse_memory("1.5GiB"), Ok(Memory::Bytes(1_610_612_736)));
        assert_eq!(parse_memory("2T"), Ok(Memory::Bytes(2_199_023_255_552)));
        assert_eq!(parse_memory("1M"), Ok(Memory::Bytes(1_048_576)));
        assert_eq!(parse_memory("25%"), Ok(Memory::Share(Percent::from_thousandths(25_000))));
        assert_eq!(parse_memory("0.5%"), Ok(Memory::Share(Percent::from_thousandths(500))));
    }

    #[test]
    fn refuses_text_that_is_no_amount() {
        for text in [
            "",
            "GiB",
            "-8GiB",
            "8GiBs",
            "8P",
            "8B",
            "0GiB",
            "0.5M",
            "1023K",
            "0%",
            "101%",
            "1e309G",
            "1e309",
            "16777216TiB",
            "99999999999999999999G",
            "٨GiB",
            "8G\0",
            "8G\n",
            ".5G",
            "5.G",
            "%",
            "1.0000000001G",
        ] {
            assert_eq!(parse_memory(text), Err(None), "{text:?}");
        }
    }

    #[test]
    fn asks_for_the_unit_of_a_bare_number() {
        let hint = "the unit is missing: write 25GiB or 25MiB or 25%".to_owned();
        assert_eq!(parse_memory("25"), Err(Some(hint)));
        let hint = "the unit is missing: write 8192MiB".to_owned();
        assert_eq!(parse_memory("8192"), Err(Some(hint)), "no GPU has 8 TiB");
        assert!(parse_memory("0.25").unwrap_err().is_some());
        for (text, meant) in [("8Gi", "8GiB"), ("8 GiB", "8GiB"), ("512 Mi", "512MiB")] {
            assert_eq!(parse_memory(text), Err(Some(format!("write {meant}"))));
        }
        for text in ["8 Zi", "8i", " ", "1 Ki", "8 G i \u{1b}"] {
            assert_eq!(parse_memory(text), Err(None), "{text}");
        }
        assert_eq!(parse_memory("0"), Err(None), "no unit makes nothing something");
        assert_eq!(parse_memory("8589934592"), Err(None), "with any unit it is more than a GPU has");
    }

    #[test]
    fn waits() {
        assert_eq!(parse_duration("0", MINUTE), Ok(Duration::ZERO));
        assert_eq!(parse_duration("0s", MINUTE), Ok(Duration::ZERO));
        assert_eq!(parse_duration("500ms", MINUTE), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("10s", MINUTE), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("1m", MINUTE), Ok(Duration::from_secs(60)));
        assert_eq!(parse_duration("2m", Duration::from_secs(600)), Ok(Duration::from_secs(120)));
        for text in ["", "s", "61s", "2m", "-1s", "1.5s", "10 s", "1h", "10S", "١s", "99999999999999999999s"]
        {
            assert_eq!(parse_duration(text, MINUTE), Err(None), "{text:?}");
        }
        let hint = "the unit is missing: write 10s".to_owned();
        assert_eq!(parse_duration("10", MINUTE), Err(Some(hint)));
        assert_eq!(parse_duration("307445734561825861m", Duration::MAX), Err(None));
    }

    #[test]
    fn durations_are_shown_as_they_are_written() {
        for text in ["0", "500ms", "1500ms", "10s", "90s", "2m"] {
            assert_eq!(show_duration(parse_duration(text, Duration::MAX).unwrap()), text);
        }
    }

    #[test]
    fn shares_of_memory_round_down_to_whole_mib() {
        let quarter = Memory::Share(Percent::from_thousandths(25_000));
        assert_eq!(quarter.on(150_121_480_192), 37_529_583_616);
        assert_eq!(Memory::Bytes(1_610_612_737).on(u64::MAX), 1_610_612_736);
    }
}
