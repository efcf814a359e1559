//! Which cells are measured, the annotations of each, and why one cannot be measured on this GPU.

use std::collections::BTreeMap;

use clap::ValueEnum as _;

use sublet_core::config::Limits;
use sublet_core::text::safe;

use super::result::{Cell, Mode, Sharing, Sm};

/// More containers at once are a mistake.
pub const MOST: u32 = 256;

impl Cell {
    /// One that nothing was measured of yet, of containers of sublet's.
    pub fn planned(load: &str, mode: Mode, n: u32) -> Self {
        let load = load.to_owned();
        let cell = Self { load, mode, n, by_hand: false, overcommitted: false, error: None, measured: None };
        Self { overcommitted: cell.beyond(&Limits::default()).is_some(), ..cell }
    }

    /// The limit on SMs of each container, in percent.
    pub(super) fn percent(&self) -> Option<f64> {
        self.mode.sm.map(|sm| sm.percent(self.n))
    }

    /// The annotations of each of its containers on the GPU with this UUID.
    pub fn annotations(&self, gpu: &str) -> BTreeMap<String, String> {
        let mut annotations = BTreeMap::from([("sublet.gpu".to_owned(), gpu.to_owned())]);
        let mut add = |key: &str, value: String| drop(annotations.insert(format!("sublet.{key}"), value));
        if self.mode.sharing == Sharing::Dedicated {
            add("mode", "mps".to_owned());
            add("isolation", "dedicated".to_owned());
        } else {
            add("mode", crate::shown::name_of(&self.mode.sharing));
        }
        if let Some(profile) = &self.mode.profile {
            add("mig", profile.clone());
        }
        if let Some(percent) = self.percent().filter(|_| self.mode.sharing != Sharing::Mig) {
            add("sm", percent.to_string());
        }
        annotations
    }

    /// Whether both are the same but for who starts them: sublet or a hand.
    pub fn is_like(&self, other: &Self) -> bool {
        self.load == other.load && self.mode == other.mode && self.n == other.n
    }

    /// The key of `[limits]` that would have to be raised, and the value; `None`: it fits.
    pub fn beyond(&self, limits: &Limits) -> Option<String> {
        let n = self.n;
        match self.mode.sharing {
            Sharing::Mps => {
                let booked = self.percent()? * f64::from(n) / 100.0;
                let least = (booked * 100.0 - 1e-6).ceil() / 100.0;
                (booked > limits.sm_overcommit + 1e-9).then(|| format!("[limits] sm_overcommit = {least:?}"))
            }
            Sharing::TimeSlice | Sharing::Dedicated => {
                (n > limits.time_slice_max).then(|| format!("[limits] time_slice_max = {n}"))
            }
            Sharing::Mig | Sharing::Exclusive => None,
        }
    }
}

/// The properties of the GPU that the plan needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// Profiles of its MIG devices, one for each device.
    pub mig_devices: Vec<String>,
    /// Whether MIG mode is on.
    pub in_mig_mode: bool,
    /// Whether MIG devices are created for containers that find none.
    pub dynamic: bool,
}

/// Why a cell cannot be measured on this GPU with these limits; `None`: it can.
pub fn obstacle(planned: &Cell, gpu: &Gpu, limits: &Limits) -> Option<String> {
    let n = planned.n;
    if gpu.in_mig_mode != (planned.mode.sharing == Sharing::Mig) {
        let is = if gpu.in_mig_mode {
            "on: only mig can be measured on it"
        } else {
            "off: `sublet mig apply` switches it on"
        };
        return Some(format!("MIG mode of the GPU is {is}"));
    }
    match planned.mode.sharing {
        Sharing::Exclusive if n > 1 => Some("an exclusive GPU has one container".to_owned()),
        Sharing::Mig if gpu.dynamic && !planned.by_hand => None,
        Sharing::Mig => lacking(planned, &gpu.mig_devices),
        _ if planned.by_hand => None,
        _ => planned.beyond(limits).map(|key| format!("more than the GPU has: set {key} to measure it")),
    }
}

/// Why there are not enough MIG devices, of which these profiles are there.
fn lacking(planned: &Cell, there: &[String]) -> Option<String> {
    let wanted = planned.mode.profile.as_ref();
    let count = there.iter().filter(|have| wanted.is_none_or(|wanted| wanted == *have)).count();
    if count >= planned.n as usize {
        return None;
    }
    let kind = wanted.map_or_else(|| "MIG device".to_owned(), |profile| safe(profile));
    let all = if there.is_empty() { "none".to_owned() } else { safe(&there.join(", ")) };
    Some(format!(
        "each container needs a {kind}, and the GPU has {count}; its MIG devices: {all} (`sublet mig apply` changes them)"
    ))
}

/// `mps`, `mps:equal`, `mps:20`, `dedicated:20`, `mig:1g.10gb`.
///
/// # Errors
/// The problem, in a sentence.
pub fn mode(text: &str) -> Result<Mode, String> {
    let (word, rest) = text.split_once(':').map_or((text, None), |(word, rest)| (word, Some(rest)));
    let sharing = Sharing::from_str(word, false).map_err(|_| {
        "modes are exclusive, time-slice, mps, mps:equal, mps:20 (percent of the SMs for each), dedicated, \
         dedicated:20, mig and mig:PROFILE"
            .to_owned()
    })?;
    let plain = Mode { sharing, sm: None, profile: None };
    match (sharing, rest) {
        (_, None) => Ok(plain),
        (Sharing::Mig, Some(profile)) => Ok(Mode { profile: Some(profile.to_owned()), ..plain }),
        (Sharing::Mps | Sharing::Dedicated, Some("equal")) => Ok(Mode { sm: Some(Sm::Equal), ..plain }),
        (Sharing::Mps | Sharing::Dedicated, Some(percent)) => {
            let percent = percent.parse().ok().filter(|percent| (1.0..=100.0).contains(percent));
            let wrong = "a limit on SMs is `equal`, or percent from 1 to 100, such as mps:20";
            Ok(Mode { sm: Some(Sm::Percent(percent.ok_or(wrong)?)), ..plain })
        }
        (Sharing::Exclusive | Sharing::TimeSlice, Some(_)) => Err(format!("{word} has no limit on SMs")),
    }
}

/// A number of containers.
///
/// # Errors
/// The problem, in a sentence.
pub fn number(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|n| (1..=MOST).contains(n)).ok_or_else(|| format!("a number from 1 to {MOST}"))
}

/// Every load in every mode with every number of containers; the base line by hand after each.
pub fn grid(loads: &[String], modes: &[Mode], numbers: &[u32], by_hand: bool) -> Vec<Cell> {
    let mut cells = Vec::new();
    for load in loads {
        for mode in modes {
            for n in numbers {
                // The GPU alone is one cell, whatever the other modes are measured with.
                if mode.sharing == Sharing::Exclusive && *n != 1 {
                    continue;
                }
                let planned = Cell::planned(load, mode.clone(), *n);
                cells.push(planned.clone());
                if by_hand {
                    cells.push(Cell { by_hand: true, overcommitted: false, ..planned });
                }
            }
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(text: &str, n: u32) -> Cell {
        Cell::planned("small", mode(text).unwrap(), n)
    }

    #[test]
    fn modes_are_read_as_they_are_written() {
        for text in ["exclusive", "time-slice", "mps", "mps:equal", "mps:14.2", "dedicated:20", "mig:1g.10gb"]
        {
            assert_eq!(mode(text).unwrap().to_string(), text);
        }
        for text in
            ["", "MPS", "mps:", "mps:0", "mps:101", "mps:x", "time-slice:20", "exclusive:equal", "mps:NaN"]
        {
            assert!(mode(text).is_err(), "{text}");
        }
        assert_eq!(number("12"), Ok(12));
        for text in ["0", "-1", "257", "x"] {
            assert!(number(text).is_err(), "{text}");
        }
    }

    #[test]
    fn annotations_say_the_mode_and_the_share_of_one_container() {
        let asked = |text: &str, n| {
            let annotations = planned(text, n).annotations("GPU-1");
            annotations.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(asked("time-slice", 7), "sublet.gpu=GPU-1 sublet.mode=time-slice");
        assert_eq!(asked("mps:equal", 7), "sublet.gpu=GPU-1 sublet.mode=mps sublet.sm=14.2");
        assert_eq!(
            asked("dedicated:20", 3),
            "sublet.gpu=GPU-1 sublet.isolation=dedicated sublet.mode=mps sublet.sm=20"
        );
        assert_eq!(asked("mig:1g.10gb", 1), "sublet.gpu=GPU-1 sublet.mig=1g.10gb sublet.mode=mig");
    }

    #[test]
    fn a_cell_beyond_the_accounts_names_the_key() {
        let why = |text: &str, n| obstacle(&planned(text, n), &Gpu::default(), &Limits::default());
        assert_eq!(why("mps:20", 5), None);
        assert_eq!(why("mps:equal", 12), None);
        let names = |text: &str, n, key: &str| why(text, n).unwrap().contains(key);
        assert!(names("mps:20", 7, "[limits] sm_overcommit = 1.4 "), "{:?}", why("mps:20", 7));
        assert!(names("mps:60", 12, "[limits] sm_overcommit = 7.2 "));
        assert!(names("time-slice", 12, "[limits] time_slice_max = 12 "));
        assert!(names("dedicated", 9, "[limits] time_slice_max = 9 "));
        let raised = Limits { sm_overcommit: 1.4, time_slice_max: 12, ..Limits::default() };
        assert_eq!(planned("mps:20", 7).beyond(&raised), None);
        assert!(planned("mps:20", 7).overcommitted);
        assert!(!planned("mps:20", 5).overcommitted);
        let by_hand = grid(&["small".to_owned()], &[mode("mps:20").unwrap()], &[7], true).pop().unwrap();
        assert!(by_hand.by_hand && !by_hand.overcommitted);
    }

    #[test]
    fn mig_devices_are_counted() {
        let gpu = Gpu {
            mig_devices: vec!["1g.10gb".into(), "1g.10gb".into(), "2g.20gb".into()],
            in_mig_mode: true,
            dynamic: false,
        };
        let why = |text: &str, n| obstacle(&planned(text, n), &gpu, &Limits::default());
        assert_eq!(why("mig", 3), None);
        assert_eq!(why("mig:1g.10gb", 2), None);
        assert!(why("mig:1g.10gb", 3).unwrap().contains("has 2"));
        let made = Gpu { dynamic: true, ..gpu.clone() };
        assert_eq!(
            obstacle(&planned("mig:1g.10gb", 3), &made, &Limits::default()),
            None,
            "it is looked at later"
        );
        let by_hand = Cell { by_hand: true, ..planned("mig:1g.10gb", 3) };
        assert!(obstacle(&by_hand, &made, &Limits::default()).unwrap().contains("has 2"));
        assert!(why("mps", 1).unwrap().contains("is on"));
        assert!(
            obstacle(&planned("mig", 1), &Gpu::default(), &Limits::default()).unwrap().contains("is off")
        );
    }

    #[test]
    fn an_exclusive_gpu_is_one_cell() {
        let modes = [mode("exclusive").unwrap(), mode("mps").unwrap()];
        let grid = grid(&["small".to_owned()], &modes, &[1, 3], true);
        let cells: Vec<_> = grid.iter().map(|cell| (cell.mode.sharing, cell.n, cell.by_hand)).collect();
        assert_eq!(
            cells,
            [
                (Sharing::Exclusive, 1, false),
                (Sharing::Exclusive, 1, true),
                (Sharing::Mps, 1, false),
                (Sharing::Mps, 1, true),
                (Sharing::Mps, 3, false),
                (Sharing::Mps, 3, true)
            ]
        );
    }
}
