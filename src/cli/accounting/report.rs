//! A report: the record of some days, counted together by one thing.

use std::collections::BTreeMap;
use std::path::Path;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::record::{DAY, Key, Sums, date, days};
use crate::names::{Of, Owner};
use crate::shown::float;

/// What is counted together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// Whom shares are for.
    #[default]
    Owner,
    /// Whose engine started the containers.
    User,
    /// What people call the container.
    Container,
    /// What it was started from.
    Image,
    /// The GPU.
    Gpu,
    /// How it was shared.
    Mode,
}

/// What a report is about.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Wanted {
    /// In milliseconds since the epoch; the whole day counts.
    pub since: u64,
    /// The same.
    pub until: u64,
    /// What is counted together.
    pub by: By,
    /// Of these alone.
    pub of: Of,
}

/// What containers held and used, from one day to another.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// `sublet.report/1`.
    pub schema: String,
    /// The first day, in UTC.
    pub since: String,
    /// The last day, which counts whole.
    pub until: String,
    /// What each row is about: `owner`, `user`, `container`, `image`, `gpu`, `mode`.
    #[schemars(with = "String")]
    pub by: By,
    /// How long nobody looked: leases that began and ended then may be missing, and what was used then is not known.
    pub unwatched_hours: f64,
    /// Days whose record cannot be read.
    pub unread: Vec<String>,
    /// The most GPU-hours first.
    pub rows: Vec<Group>,
    /// All together.
    pub total: Group,
}

/// What is counted together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Group {
    /// The owner, user, container, image, UUID of the GPU, or mode; empty where that is not known.
    pub name: String,
    /// Of an owner: how that is known, as in `sublet status`.
    #[schemars(with = "Option<String>")]
    pub known_by: Option<crate::names::KnownBy>,
    /// GPU-hours that were held, each GPU whole, however small the share.
    pub whole_gpu_hours: f64,
    /// GPU-hours by the share of the SMs: a quarter of them for four hours is one.
    pub sm_gpu_hours: f64,
    /// GPU-hours by the share of the memory.
    pub memory_gpu_hours: f64,
    /// GPU-hours that were computed, as far as the driver tells; null: it tells nothing.
    pub used_gpu_hours: Option<f64>,
    /// Of `whole_gpu_hours`, those for which the driver told what was computed.
    pub told_gpu_hours: f64,
    /// Leases that began.
    pub leases: u64,
    /// Leases whose end nobody saw: they count up to the last sign of life.
    pub unseen_ends: u64,
    /// Containers that were refused.
    pub refusals: u64,
    /// Leases that were waited for, a second or longer.
    pub waits: u64,
    /// How long, together.
    pub waited_seconds: f64,
}

impl Wanted {
    /// The report of the record in `dir`; `own`: of this user's containers alone. One day after the other is read.
    pub(super) fn report(&self, dir: &Path, own: Option<u32>) -> Report {
        let (since, until) = (date(self.since), date(self.until));
        let mut report = Report {
            schema: "sublet.report/1".to_owned(),
            since: since.clone(),
            until: until.clone(),
            by: self.by,
            ..Report::default()
        };
        let (mut groups, mut total) = (BTreeMap::<Option<Owner>, Sums>::new(), Sums::default());
        let mut unwatched = 0;
        for day in days(dir, &since, &until) {
            match day {
                Err(unread) => report.unread.push(unread),
                Ok(day) => {
                    unwatched += day.unwatched.min(DAY);
                    let is_own = |key: &Key| own.is_none_or(|uid| key.uid == uid);
                    let is_wanted = |key: &Key| is_own(key) && self.of.has(key.uid, key.owner.as_ref());
                    for row in day.rows.into_iter().filter(|row| is_wanted(&row.key)) {
                        total += row.sums;
                        *groups.entry(self.by.of(row.key)).or_default() += row.sums;
                    }
                }
            }
        }
        report.unwatched_hours = hours(unwatched);
        report.rows = groups.into_iter().map(|(name, sums)| Group::of(name, self.by, sums)).collect();
        report.rows.sort_by(|one, other| other.whole_gpu_hours.total_cmp(&one.whole_gpu_hours));
        report.total = Group::of(None, self.by, total);
        report
    }
}

impl By {
    /// What stands for `key`. Only of an owner it matters how that is known.
    fn of(self, key: Key) -> Option<Owner> {
        let name = match self {
            Self::Owner => return key.owner,
            Self::User => key.user,
            Self::Container => key.container,
            Self::Image => key.image,
            Self::Gpu => key.gpu,
            Self::Mode => key.mode,
        };
        (!name.is_empty()).then_some(Owner { name, known_by: crate::names::KnownBy::User })
    }
}

impl Group {
    fn of(name: Option<Owner>, by: By, sums: Sums) -> Self {
        let shares = |sum: u64| hours(sum) / 100_000.0;
        Self {
            known_by: name.as_ref().filter(|_| by == By::Owner).map(|owner| owner.known_by),
            name: name.map(|owner| owner.name).unwrap_or_default(),
            whole_gpu_hours: hours(sums.held),
            sm_gpu_hours: shares(sums.sm),
            memory_gpu_hours: shares(sums.memory),
            used_gpu_hours: (sums.told > 0).then(|| shares(sums.used)),
            told_gpu_hours: hours(sums.told),
            leases: sums.leases,
            unseen_ends: sums.unseen_ends,
            refusals: sums.refusals,
            waits: sums.waits,
            waited_seconds: float(sums.waited) / 1000.0,
        }
    }

    /// For people: of an owner, also how that is known.
    pub fn words(&self) -> String {
        let owner = self.known_by.map(|known_by| Owner { name: self.name.clone(), known_by }.words());
        let name = owner.unwrap_or_else(|| sublet_core::text::safe(&self.name));
        if name.is_empty() { "-".to_owned() } else { name }
    }
}

fn hours(milliseconds: u64) -> f64 {
    float(milliseconds) / 3_600_000.0
}
