//! `[[policy]]`: the policy limits of users without root, for `sublet serve`.

use serde::{Deserialize, Serialize};

use super::values;
use crate::share::{Mode, Percent};

/// One rule. The first rule whose user or group matches counts. A key that is absent limits nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyRule {
    /// A user's name or uid, or `*` for every user in the host's user database.
    #[serde(deserialize_with = "values::some_word", skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A group's name or gid, for each of its members.
    #[serde(deserialize_with = "values::some_word", skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The modes they may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modes: Option<Vec<Mode>>,
    /// The SM shares of one user's leases may add up to this. A request must then name its share.
    #[serde(with = "values::percent_sum", skip_serializing_if = "Option::is_none")]
    pub sm: Option<Percent>,
    /// The memory of one user's leases may add up to this, in bytes. A request must then name its amount.
    #[serde(with = "values::some_memory", skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Selectors as in `sublet.gpu`: the devices that they may use. By default any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<values::Word>>,
    /// How many leases one user may hold at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leases: Option<u32>,
    /// Whether MIG instances are created for them, if `[mig] dynamic` is on.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dynamic: bool,
}
