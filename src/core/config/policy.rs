//! `[[policy]]`: the policy limits of users without root, for `sublet serve`.

use serde::{Deserialize, Serialize};

use super::values;
use crate::share::{Mode, Percent};

/// One rule; of all rules the first whose user or group fits counts. A key that is absent caps nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyRule {
    /// A user's name or uid, or `*`: every user that the host's user database knows.
    #[serde(deserialize_with = "values::some_word", skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A group's name or gid: each of its members.
    #[serde(deserialize_with = "values::some_word", skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The modes they may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modes: Option<Vec<Mode>>,
    /// The SM shares of one user's leases may add up to this; a request must name its own.
    #[serde(with = "values::percent_sum", skip_serializing_if = "Option::is_none")]
    pub sm: Option<Percent>,
    /// The memory of one user's leases may add up to this, in bytes; a request must name its own.
    #[serde(with = "values::some_memory", skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Selectors as in `sublet.gpu`: the devices they may use, any by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<values::Word>>,
    /// How many leases one user may hold at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leases: Option<u32>,
    /// Whether MIG instances are made for them, where `[mig] dynamic` has any made.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dynamic: bool,
}
