//! How a client's limits follow from its own settings and its server's.

use super::message::{Open, Settings};

/// Parses a percentage of the control program or of a client's environment. `None` if it is invalid.
pub fn percentage(text: &str) -> Option<f64> {
    text.trim().parse().ok().filter(|value: &f64| *value > 0.0 && *value <= 100.0)
}

/// The SMs that a client sees: its percentage of all SMs, rounded down to an even number, and at least 8
/// (docs/evidence). Its percentage is limited to the server's. An invalid percentage is ignored.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a small count")]
pub fn sm(all: u32, settings: &Settings, asked: Option<&str>) -> u32 {
    let share = asked.and_then(percentage).map_or(settings.percentage, |own| own.min(settings.percentage));
    if share >= 100.0 {
        return all;
    }
    let part = (f64::from(all) * share / 100.0) as u32;
    (part & !1).max(8).min(all)
}

/// The memory that a client may use, in MiB: its own limit, at most its server's. If one of its entries is invalid, or
/// names a device that it does not see, no limit applies at all, not even the server's.
///
/// The server's limits apply by the client's ordinals, however they were set: a client that sees only the server's
/// second device has the limit of the first (two H200s, docs/evidence).
pub fn memory(settings: &Settings, open: &Open) -> Option<u64> {
    let ordinal = open.visible.iter().position(|uuid| *uuid == open.device);
    let server = ordinal.and_then(|ordinal| settings.pinned.get(&ordinal)).and_then(|value| size(value));
    let Some(own) = &open.pinned else { return server };
    let entries: Option<Vec<_>> = own.split(',').map(|entry| pinned_entry(entry, &open.visible)).collect();
    let own = entries?.into_iter().find(|(device, _)| **device == open.device).map(|(_, mib)| mib);
    own.into_iter().chain(server).min()
}

/// One `<index or UUID>=<size>`.
fn pinned_entry<'a>(entry: &str, visible: &'a [String]) -> Option<(&'a String, u64)> {
    let (device, value) = entry.split_once('=')?;
    Some((named(device, visible)?, size(value)?))
}

/// The device that an index or a UUID names.
fn named<'a>(device: &str, devices: &'a [String]) -> Option<&'a String> {
    ordinal(device, devices).and_then(|ordinal| devices.get(ordinal))
}

/// The ordinal among `devices` of the one that an index or a UUID names.
pub fn ordinal(device: &str, devices: &[String]) -> Option<usize> {
    let device = device.trim();
    match device.parse::<usize>() {
        Ok(index) => Some(index).filter(|index| *index < devices.len()),
        Err(_) => devices.iter().position(|uuid| *uuid == device),
    }
}

/// `2G` or `2048M`, in MiB.
pub fn size(value: &str) -> Option<u64> {
    let value = value.trim();
    let mib = match value.strip_suffix('G') {
        Some(number) => number.parse::<u64>().ok()?.checked_mul(1024)?,
        None => value.strip_suffix('M')?.parse().ok()?,
    };
    (mib > 0).then_some(mib)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "GPU-1";

    fn open(pinned: &str) -> Open {
        let pinned = (!pinned.is_empty()).then(|| pinned.to_owned());
        Open { device: OWN.into(), visible: vec![OWN.into()], pinned, ..Open::default() }
    }

    #[test]
    fn sms_are_those_of_the_h200() {
        let full = Settings::default();
        for (asked, seen) in [("25", 32), ("12.5", 16), ("10", 12), ("60", 78), ("30", 38), ("100", 132)] {
            assert_eq!(sm(132, &full, Some(asked)), seen, "{asked}");
        }
        let third = Settings { percentage: 30.0, ..Settings::default() };
        for asked in [Some("60"), Some("abc"), Some("0"), None] {
            assert_eq!(sm(132, &third, asked), 38, "{asked:?}");
        }
        assert_eq!(sm(132, &third, Some("25")), 32);
    }

    #[test]
    fn one_bad_entry_drops_every_limit() {
        let server = Settings { pinned: [(0, "3G".into())].into(), ..Settings::default() };
        assert_eq!(memory(&server, &open("")), Some(3072));
        assert_eq!(memory(&server, &open("0=2G")), Some(2048));
        assert_eq!(memory(&server, &open("GPU-1=2048M")), Some(2048));
        assert_eq!(memory(&server, &open("0=4G")), Some(3072));
        for bad in ["garbage", "0=2G,7=1G", "0=2G,GPU-0=1G", "0=2", "0=2g", "0=0G"] {
            assert_eq!(memory(&server, &open(bad)), None, "{bad}");
        }
        assert_eq!(memory(&Settings::default(), &open("0=2G")), Some(2048));
    }

    #[test]
    fn a_servers_limits_are_for_the_clients_ordinals() {
        let server = Settings { pinned: [(0, "4G".into()), (1, "6G".into())].into(), ..Settings::default() };
        let seen = |visible: &[&str], pinned: Option<&str>| {
            let visible: Vec<String> = visible.iter().map(|uuid| (*uuid).to_owned()).collect();
            let pinned = pinned.map(str::to_owned);
            let open = Open { visible: visible.clone(), pinned, ..Open::default() };
            let each = visible.into_iter().map(|device| memory(&server, &Open { device, ..open.clone() }));
            each.collect::<Vec<_>>()
        };
        assert_eq!(seen(&["GPU-0", "GPU-1"], None), [Some(4096), Some(6144)]);
        assert_eq!(seen(&["GPU-1"], None), [Some(4096)]);
        assert_eq!(seen(&["GPU-1", "GPU-0"], None), [Some(4096), Some(6144)]);
        assert_eq!(seen(&["GPU-1"], Some("0=9G")), [Some(4096)], "clamped");
        assert_eq!(seen(&["GPU-1"], Some("0=2G")), [Some(2048)]);
        assert_eq!(seen(&["GPU-1"], Some("0=2G,1=3G")), [None]);
    }
}
