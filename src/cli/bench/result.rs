//! The result of `sublet bench`: the settings, the machine, and the figures of each cell of the grid. It is the
//! document that is written as JSON, shown, compared and advised from.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;
use std::{fmt, fs};

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use sublet_core::text::safe;

/// The form of the document. Keys may be added to a form, never changed.
pub const SCHEMA: &str = "sublet.bench/1";

/// Larger files are no results.
const LARGEST: u64 = 64 << 20;

/// Everything that one measurement came to, and what repeats it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Bench")]
pub struct BenchResult {
    /// `sublet.bench/1`.
    pub schema: String,
    /// What was measured, in a few words, such as `YOLOS-small in PyTorch`.
    pub title: String,
    /// Whether the driver is sublet's simulated one, whose times mean nothing.
    pub simulated: bool,
    /// Whether other programs used the GPU during the measurement.
    pub in_use_by_others: bool,
    /// When it was begun, RFC 3339 in UTC.
    pub time: String,
    /// Where the numbers are from if sublet did not measure them: a publication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    pub machine: Machine,
    pub settings: Settings,
    /// One for each load, mode and N that was measured or failed, in the order of measurement.
    pub cells: Vec<Cell>,
}

/// The machine. What is not known is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Machine {
    /// The name that NVML has for the GPU.
    pub gpu: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Streaming multiprocessors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// The highest clock of the SMs, in MHz.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sm_mhz: Option<u32>,
    /// In milliwatts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_limit_milliwatts: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Processors that this program may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processors: Option<usize>,
    /// Version of sublet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sublet: Option<String>,
    /// The engine and its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
}

/// What was asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Measured for so long, in seconds.
    pub seconds: f64,
    /// Run before for so long, all at once, in seconds.
    pub warm_up_seconds: f64,
    /// How often each cell was measured; its figures are those of the median.
    pub repeat: u32,
    /// The user's image, or root file system; empty for built-in loads.
    pub image: String,
    /// The user's command; empty for built-in loads.
    pub command: Vec<String>,
    /// The pattern that finds a latency in a line.
    pub parse: String,
    /// The URL that was asked; `{port}` is a container's own.
    pub http: String,
    /// Further words for the engine's `run`.
    pub run_options: Vec<String>,
    /// Limit on SMs that may be booked, as a multiple of all (`sm_overcommit`).
    pub sm_overcommit: f64,
    /// The most containers that share a GPU by turns (`time_slice_max`).
    pub time_slice_max: u32,
}

/// How the containers of a cell share the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// The whole GPU, one container.
    Exclusive,
    /// By turns.
    TimeSlice,
    /// On a shared MPS server.
    Mps,
    /// Each with an MPS server of its own.
    Dedicated,
    /// Each with a MIG device.
    Mig,
}

/// A line of the picture: a way to share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Mode {
    pub sharing: Sharing,
    /// The limit on SMs; null: none.
    pub sm: Option<Sm>,
    /// The MIG profile, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
}

/// A limit on SMs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Sm {
    /// 100 % divided by the number of containers.
    Equal,
    /// In percent, the same for all.
    Percent(f64),
}

impl Sm {
    /// In percent for `n` containers, rounded down to a tenth.
    pub fn percent(self, n: u32) -> f64 {
        match self {
            Self::Equal => (1000.0 / f64::from(n.max(1))).floor() / 10.0,
            Self::Percent(percent) => percent,
        }
    }
}

/// As on the command line: `mps`, `mps:equal`, `mps:20`, `mig:1g.10gb`.
impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::shown::name_of(&self.sharing))?;
        match self.sm {
            Some(Sm::Equal) => f.write_str(":equal")?,
            Some(Sm::Percent(percent)) => write!(f, ":{percent}")?,
            None => {}
        }
        self.profile.as_ref().map_or(Ok(()), |profile| write!(f, ":{}", safe(profile)))
    }
}

impl Mode {
    /// [`Self::title`], and whether the programs ran by hand.
    pub(crate) fn titled(&self, by_hand: bool) -> String {
        self.title() + if by_hand { ", by hand" } else { "" }
    }

    /// For people: `MPS, 100 % ÷ N each`.
    pub(crate) fn title(&self) -> String {
        let name = match self.sharing {
            Sharing::Exclusive => "exclusive",
            Sharing::TimeSlice => "time-slice",
            Sharing::Mps => "MPS",
            Sharing::Dedicated => "dedicated MPS",
            Sharing::Mig => "MIG",
        };
        let limit = match self.sm {
            Some(Sm::Equal) => ", 100 %/N each".to_owned(),
            Some(Sm::Percent(percent)) => format!(", {percent} % each"),
            None => String::new(),
        };
        let profile = self.profile.as_ref().map(|profile| format!(" {}", safe(profile))).unwrap_or_default();
        format!("{name}{profile}{limit}")
    }
}

/// One load in one mode with one number of containers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Cell {
    /// `small`, `medium`, `large`, `memory`, `copy`, `mixed`: built in. `command` or `http`: the user's own.
    pub load: String,
    pub mode: Mode,
    /// How many containers ran at once.
    pub n: u32,
    /// Whether the programs ran as processes by hand, without sublet and without containers.
    #[serde(default)]
    pub by_hand: bool,
    /// Whether the shares come to more than the GPU has.
    #[serde(default)]
    pub overcommitted: bool,
    /// Why nothing was measured, or what went wrong with a part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What was measured; null: nothing.
    pub measured: Option<Measured>,
}

/// The figures of a cell: those of all its containers together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Measured {
    /// Milliseconds for one iteration, over all iterations of all containers.
    pub mean_ms: f64,
    /// Those of every repeat, in their order: this measurement is the one in the middle.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub repeats_ms: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_ms: Option<f64>,
    /// Iterations a second, all containers together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_second: Option<f64>,
    /// Iterations of the container that got the fewest, divided by those of the one that got the most: 1 is fair.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fairness: Option<f64>,
    /// Memory of the GPU that the containers, and the MPS servers that they needed, took together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Energy of the whole GPU, divided by all iterations, in millijoules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_millijoules: Option<f64>,
    /// The clock of the SMs in the middle of the measurement, in MHz.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_mhz: Option<u32>,
    /// One for each container.
    pub containers: Vec<Tenant>,
}

/// One container of a cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Tenant {
    /// In the measured time.
    pub iterations: u64,
    pub mean_ms: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// Why it did not work all the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Why a result cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ResultError(String);

/// The comparison by the authors of nos.
const PUBLISHED: &str = include_str!("nos.json");

impl BenchResult {
    /// Reads a result from a file; `published` is the one that this project starts from.
    pub fn of(path: &Path) -> Result<Self, ResultError> {
        if path == Path::new("published") { Self::parse(PUBLISHED, "published") } else { Self::read(path) }
    }

    /// Reads a result from a file.
    ///
    /// # Errors
    /// The file cannot be read, is none of these documents, or one of another form.
    pub fn read(path: &Path) -> Result<Self, ResultError> {
        let name = path.to_string_lossy();
        let unreadable = |error: std::io::Error| ResultError(format!("{}: {error}", safe(&name)));
        if fs::metadata(path).map_err(unreadable)?.len() > LARGEST {
            return Err(unreadable(std::io::Error::new(ErrorKind::FileTooLarge, "larger than 64 MiB")));
        }
        Self::parse(&fs::read_to_string(path).map_err(unreadable)?, &name)
    }

    /// Reads a result from the text of the file `name`.
    ///
    /// # Errors
    /// It is none of these documents, or one of another form.
    pub fn parse(text: &str, name: &str) -> Result<Self, ResultError> {
        let name = safe(name);
        let wrong = |why: &str| ResultError(format!("{name} is no result of `sublet bench`: {}", safe(why)));
        let malformed = |why: serde_json::Error| wrong(&why.to_string());
        let value: serde_json::Value = serde_json::from_str(text).map_err(malformed)?;
        match value.get("schema").and_then(serde_json::Value::as_str) {
            Some(SCHEMA) => serde_json::from_value(value).map_err(malformed),
            Some(schema) => Err(ResultError(format!(
                "{name}: its form is {}, and this sublet reads {SCHEMA}: use the sublet that wrote it",
                safe(schema)
            ))),
            None => Err(wrong("it has no schema")),
        }
    }

    /// The loads, in the order in which they were first measured.
    pub fn loads(&self) -> Vec<&str> {
        distinct(self.cells.iter().map(|cell| cell.load.as_str()))
    }

    /// The cells of one load.
    pub fn of_load(&self, load: &str) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(move |cell| cell.load == load)
    }

    /// The lines of a load: its modes, and whether by hand, in the order in which they were first measured.
    pub fn lines(&self, load: &str) -> Vec<(&Mode, bool)> {
        distinct(self.of_load(load).map(|cell| (&cell.mode, cell.by_hand)))
    }

    /// The numbers of containers that a load was measured with.
    pub fn numbers(&self, load: &str) -> Vec<u32> {
        self.of_load(load).map(|cell| cell.n).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The cell of one load, mode and number of containers.
    pub fn cell(&self, load: &str, mode: &Mode, n: u32, by_hand: bool) -> Option<&Cell> {
        self.of_load(load).find(|cell| cell.mode == *mode && cell.n == n && cell.by_hand == by_hand)
    }
}

/// Each of `all` where it first stands.
pub(super) fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for one in all {
        if !found.contains(&one) {
            found.push(one);
        }
    }
    found
}

/// One figure of [`Measured`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Figure {
    #[default]
    Mean,
    P50,
    P99,
    Throughput,
    Fairness,
    Memory,
    Energy,
}

impl Figure {
    /// All of them, the most important first.
    pub const ALL: [Self; 7] =
        [Self::Mean, Self::P50, Self::P99, Self::Throughput, Self::Fairness, Self::Memory, Self::Energy];

    /// Its name with its unit.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Mean => "mean of one iteration, ms",
            Self::P50 => "median of one iteration, ms",
            Self::P99 => "99th percentile, ms",
            Self::Throughput => "iterations a second, all together",
            Self::Fairness => "fairness: least served / most served",
            Self::Memory => "GPU memory of all, GiB",
            Self::Energy => "energy of the GPU for one iteration, J",
        }
    }

    /// Its value in that unit, if it is known.
    pub fn of(self, measured: &Measured) -> Option<f64> {
        match self {
            Self::Mean => Some(measured.mean_ms),
            Self::P50 => measured.p50_ms,
            Self::P99 => measured.p99_ms,
            Self::Throughput => measured.per_second,
            Self::Fairness => measured.fairness,
            Self::Memory => {
                measured.memory_bytes.map(|bytes| crate::shown::float(bytes) / f64::from(1 << 30))
            }
            Self::Energy => measured.energy_millijoules.map(|energy| energy / 1000.0),
        }
    }
}

/// With three digits: `0.97`, `7.19`, `54.9`, `1920`.
pub fn digits(value: f64) -> String {
    match value.abs() {
        size if size < 9.995 => format!("{value:.2}"),
        size if size < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_have_a_word_and_a_title() {
        let mode = |sharing, sm| Mode { sharing, sm, profile: None };
        assert_eq!(mode(Sharing::TimeSlice, None).to_string(), "time-slice");
        assert_eq!(mode(Sharing::Mps, Some(Sm::Equal)).to_string(), "mps:equal");
        assert_eq!(mode(Sharing::Mps, Some(Sm::Percent(14.2))).to_string(), "mps:14.2");
        assert_eq!(mode(Sharing::Dedicated, Some(Sm::Percent(20.0))).title(), "dedicated MPS, 20 % each");
        let mig = Mode { sharing: Sharing::Mig, sm: None, profile: Some("1g.10gb".to_owned()) };
        assert_eq!((mig.to_string(), mig.title()), ("mig:1g.10gb".to_owned(), "MIG 1g.10gb".to_owned()));
    }

    #[test]
    fn equal_parts_never_come_to_more_than_all() {
        assert!((Sm::Equal.percent(7) - 14.2).abs() < 1e-9);
        assert!((Sm::Equal.percent(3) - 33.3).abs() < 1e-9);
        for n in 1..=48 {
            assert!(Sm::Equal.percent(n) * f64::from(n) <= 100.0);
        }
    }

    #[test]
    fn other_forms_and_other_files_are_refused() {
        let why = |text: &str| BenchResult::parse(text, "a.json").unwrap_err().to_string();
        assert!(why("{}").contains("it has no schema"));
        assert!(why("[1").contains("a.json is no result of `sublet bench`"));
        assert!(why(r#"{"schema":"sublet.bench/2"}"#).contains("its form is sublet.bench/2"));
        assert!(why(r#"{"schema":"sublet.bench/1"}"#).contains("missing field"));
    }

    #[test]
    fn three_digits() {
        let all = [0.0, 0.974, 7.19, 9.996, 54.94, 99.96, 1919.6].map(digits);
        assert_eq!(all, ["0.00", "0.97", "7.19", "10.0", "54.9", "100", "1920"]);
    }
}
