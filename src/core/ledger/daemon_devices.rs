//! The devices of an MPS daemon in `ledger.json`: a string for one device, as in every release, and a list for several.

use serde::{Deserialize, Deserializer, Serialize as _, Serializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    One(String),
    Several(Vec<String>),
}

pub(super) fn serialize<S: Serializer>(devices: &[String], to: S) -> Result<S::Ok, S::Error> {
    match devices {
        [] => to.serialize_str(""),
        [one] => to.serialize_str(one),
        several => several.serialize(to),
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Ok(match Written::deserialize(from)? {
        Written::One(device) if device.is_empty() => Vec::new(),
        Written::One(device) => vec![device],
        Written::Several(devices) => devices,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{DaemonState, DefaultLimits, MpsDaemon};
    use crate::ledger::DaemonKey;

    #[test]
    fn one_device_is_written_as_it_always_was_and_several_are_a_list() {
        for (devices, written) in [
            (&[][..], "\"device\":\"\""),
            (&["GPU-a"], "\"device\":\"GPU-a\""),
            (&["GPU-a", "GPU-b"], "\"device\":[\"GPU-a\",\"GPU-b\"]"),
        ] {
            let daemon = MpsDaemon {
                key: DaemonKey("0000000000000001".into()),
                devices: devices.iter().map(|uuid| (*uuid).to_owned()).collect(),
                process: None,
                state: DaemonState::Serving,
                default_limits: DefaultLimits::NONE,
                answered_at: 1,
                idle_since: None,
                mode_left: false,
            };
            let text = serde_json::to_string(&daemon).unwrap();
            assert!(text.contains(written), "{text}");
            assert_eq!(serde_json::from_str::<MpsDaemon>(&text).unwrap(), daemon);
        }
    }
}
