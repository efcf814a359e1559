//! What a user without root sees below the tables: their own policy limits, and what is left of them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::tables;
use sublet_core::admit;
use sublet_core::broker::policy_limits::Left;
use sublet_core::config::{Config, PolicyRule};
use sublet_core::text::safe;

/// The member `own` of `sublet status --format json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Own {
    /// The job of Slurm's in which the user asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<u64>,
    /// The policy rule that names the user; `None` if there is none, see `refused`.
    policy: Option<PolicyRule>,
    /// What the user may still take under that rule.
    left: Option<Left>,
    /// The reason why the user can take nothing, in one line.
    refused: Option<String>,
}

impl Own {
    /// Asks `sublet serve`.
    pub fn ask(config: &Config) -> Self {
        let refused = |reason: String| Self { refused: Some(reason), ..Self::default() };
        match admit::own_status(config).map(serde_json::from_value) {
            Ok(Ok(own)) => own,
            Ok(Err(error)) => refused(format!("sublet serve: {}", safe(&error.to_string()))),
            Err(error) => refused(error.to_string()),
        }
    }
}

impl fmt::Display for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(reason) = &self.refused {
            return write!(f, "You cannot take a share: {reason}");
        }
        if let Some(job) = self.job {
            return write!(f, "In job {job}, programs and containers have what the job got from Slurm.");
        }
        let (Some(rule), Some(left)) = (&self.policy, &self.left) else {
            return f.write_str("You have no policy limits.");
        };
        let caps = caps(rule, left);
        if caps.is_empty() {
            return f.write_str("Your policy sets no limits.");
        }
        write!(f, "Your policy: {}", caps.join("; "))
    }
}

fn caps(rule: &PolicyRule, left: &Left) -> Vec<String> {
    let words = |words: Vec<&str>| safe(&words.join(", "));
    let modes = rule.modes.as_ref().map(|modes| modes.iter().map(|mode| mode.as_str()).collect());
    let devices = rule.devices.as_ref().map(|devices| devices.iter().map(|device| &**device).collect());
    [
        modes.map(|modes| format!("modes {}", words(modes))),
        rule.sm.zip(left.sm_percent).map(|(cap, left)| format!("sm {cap} %, {left} % left")),
        rule.memory
            .zip(left.memory_bytes)
            .map(|(cap, left)| format!("memory {}, {} left", tables::memory(cap), tables::memory(left))),
        devices.map(|devices| format!("devices {}", words(devices))),
        rule.leases.zip(left.leases).map(|(cap, left)| format!("leases {cap}, {left} left")),
    ]
    .into_iter()
    .flatten()
    .collect()
}
