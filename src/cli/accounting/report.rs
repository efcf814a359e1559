//! A report: the record of some days, counted together by one thing.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::SystemTime;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::record::{DAY, DIRECTORY, Key, OTHERS, Sums, days};
use crate::events::parse_moment;
use crate::names::{KnownBy, Of, Owner};
use crate::shown::{float, or_dash};
use sublet_core::config::Config;
use sublet_core::events::timestamp;
use sublet_core::text::safe;

/// Rows of a report that `sublet serve` gives to a user without root; an answer of the service's has 8 MiB at most.
const MOST_OF_A_USER: usize = 2000;

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
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
pub struct Wanted {
    /// Since then: 2026-11-23, 2026-11-23T07:00:00Z, or how long ago, as 30d; the whole day counts
    #[arg(long, value_name = "TIME", default_value = "30d", value_parser = parse_moment)]
    pub since: SystemTime,
    /// Until then; the whole day counts
    #[arg(long, value_name = "TIME", default_value = "0s", hide_default_value = true, value_parser = parse_moment)]
    pub until: SystemTime,
    /// What is counted together
    #[arg(long, value_enum, default_value_t)]
    pub by: By,
    #[command(flatten)]
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
    pub known_by: Option<KnownBy>,
    /// GPU-hours that were held, each GPU whole, however small the share.
    pub whole_gpu_hours: f64,
    /// GPU-hours by the share of the SMs: a quarter of them for four hours is one.
    pub sm_gpu_hours: f64,
    /// GPU-hours by the share of the memory.
    pub memory_gpu_hours: f64,
    /// GPU-hours that were computed, as far as the driver tells; null: it tells nothing.
    pub used_gpu_hours: Option<f64>,
    /// Of `whole_gpu_hours`, the hours for which the driver measured what was computed.
    pub measured_gpu_hours: f64,
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
    /// The report; `own`: of this user's containers alone. One day after the other is read.
    pub fn report(&self, own: Option<u32>, config: &Config) -> Report {
        let day = |time| timestamp(time).chars().take(10).collect::<String>();
        let (since, until) = (day(self.since), day(self.until));
        let (mut groups, mut total) = (BTreeMap::<Name, Sums>::new(), Sums::default());
        let (mut unread, mut unwatched) = (Vec::new(), 0);
        let is_wanted =
            |key: &Key| own.is_none_or(|uid| key.uid == uid) && self.of.has(&key.user, key.owner.as_ref());
        for day in days(&config.lasting_dir().join(DIRECTORY), &since, &until) {
            let Ok(day) = day.map_err(|date| unread.push(date)) else { continue };
            unwatched += day.unwatched.min(DAY);
            for (key, sums) in day.rows.into_iter().filter(|(key, _)| is_wanted(key)) {
                total.add(sums);
                groups.entry(self.by.of(key)).or_default().add(sums);
            }
        }
        let mut groups: Vec<(Name, Sums)> = groups.into_iter().collect();
        groups.sort_by_key(|(_, sums)| Reverse(sums.held));
        // The service's answer has to fit.
        if own.is_some() && groups.len() > MOST_OF_A_USER {
            let mut rest = Sums::default();
            groups.drain(MOST_OF_A_USER..).for_each(|(_, sums)| rest.add(sums));
            groups.push(((OTHERS.to_owned(), None), rest));
        }
        let rows = groups.into_iter().map(Group::of).collect();
        let (schema, total) = ("sublet.report/1".to_owned(), Group::of((Name::default(), total)));
        Report { schema, since, until, by: self.by, unwatched_hours: hours(unwatched), unread, rows, total }
    }
}

/// What stands for a group, and how it is known, which matters only of an owner.
type Name = (String, Option<KnownBy>);

impl By {
    fn of(self, key: Key) -> Name {
        let name = match self {
            Self::Owner => return key.owner.map(|one| (one.name, Some(one.known_by))).unwrap_or_default(),
            Self::User => key.user,
            Self::Container => key.container,
            Self::Image => key.image,
            Self::Gpu => key.gpu,
            Self::Mode => key.mode,
        };
        (name, None)
    }
}

impl Group {
    fn of(((name, known_by), sums): (Name, Sums)) -> Self {
        let shares = |sum: u64| hours(sum) / 100_000.0;
        Self {
            name,
            known_by,
            whole_gpu_hours: hours(sums.held),
            sm_gpu_hours: shares(sums.sm),
            memory_gpu_hours: shares(sums.memory),
            used_gpu_hours: (sums.measured > 0).then(|| shares(sums.used)),
            measured_gpu_hours: hours(sums.measured),
            leases: sums.leases,
            unseen_ends: sums.unseen_ends,
            refusals: sums.refusals,
            waits: sums.waits,
            waited_seconds: float(sums.waited) / 1000.0,
        }
    }

    /// For people: of an owner, also how that is known.
    pub fn words(&self) -> String {
        let owner = |known_by| Owner { name: self.name.clone(), known_by }.words();
        let bare = || or_dash(Some(safe(&self.name)).filter(|name| !name.is_empty()));
        self.known_by.map_or_else(bare, owner)
    }
}

fn hours(milliseconds: u64) -> f64 {
    float(milliseconds) / 3_600_000.0
}
