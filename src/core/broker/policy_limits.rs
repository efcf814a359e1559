//! A user's policy limits (`[[policy]]`), checked under the ledger's lock, when the placement is known.

use serde::{Deserialize, Serialize};

use crate::config::{Config, PolicyRule, Use};
use crate::ledger::{Lease, LeasedMigDevice, Ledger};
use crate::place::Placement;
use crate::request::Request;
use crate::share::{MIB, Mode, Percent};

/// A user's policy limit.
#[derive(Clone, Copy, Debug)]
pub struct PolicyLimit<'a> {
    /// The user whose leases count.
    pub uid: u32,
    /// The rule that limits them.
    pub rule: &'a PolicyRule,
}

/// More than the user's policy allows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyLimitError {
    /// `modes`: those that the rule allows, and that of the placement.
    #[error("your policy allows {0}, and this is {1}; fix: set sublet.mode to one that it allows")]
    Mode(String, Mode),
    /// `sm` or `memory` (the annotation's key) is limited by the policy, and the request names no amount.
    #[error(
        "your policy limits {0} to {1}, and this names no limit; fix: say with sublet.{0} how much it takes"
    )]
    Unlimited(&'static str, String),
    /// `sm` or `memory`.
    #[error(
        "your policy limits {key} to {limit}; why: your containers hold {held}, and this one asks for \
         {asked}; fix: {}", if *.temporary { "end a container first" } else { "ask for less" }
    )]
    Sum {
        /// The annotation's key.
        key: &'static str,
        /// The policy limit.
        limit: String,
        /// The sum of all the user's leases.
        held: String,
        /// This request's.
        asked: String,
        /// Whether the end of other leases would help.
        temporary: bool,
    },
    /// `sublet.mig-caps`
    #[error(
        "only root's containers may have sublet.mig-caps; why: it gives access to the MIG instances of all \
         users; fix: leave it out"
    )]
    MigCaps,
    /// `leases`
    #[error(
        "your policy limits your containers to {}; fix: {}", .0,
        if *.0 == 0 { "ask root" } else { "end one first" }
    )]
    Leases(u32),
}

impl PolicyLimitError {
    /// Whether waiting may help.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Leases(1..) | Self::Sum { temporary: true, .. })
    }
}

impl PolicyLimit<'_> {
    /// Checks whether the user may take such a share, wherever it is placed and whatever they hold.
    ///
    /// # Errors
    /// The policy has other modes.
    pub fn check_request(&self, request: &Request, config: &Config) -> Result<(), PolicyLimitError> {
        let is_open = config.device.iter().all(|rule| rule.fixed_use.and_then(Use::mode).is_none());
        let mode = request.mode.or(is_open.then_some(request.default_mode));
        mode.map_or(Ok(()), |mode| self.check_mode(mode))
    }

    fn check_mode(&self, mode: Mode) -> Result<(), PolicyLimitError> {
        let Some(modes) = self.rule.modes.as_ref().filter(|modes| !modes.contains(&mode)) else {
            return Ok(());
        };
        let allowed = modes.iter().map(Into::into).collect::<Vec<&str>>().join(", ");
        Err(PolicyLimitError::Mode(allowed, mode))
    }

    /// Checks whether the user may take `placement` in addition to their leases in `ledger`.
    ///
    /// # Errors
    /// The first limit that it would exceed.
    pub fn check(&self, placement: &Placement, ledger: &Ledger) -> Result<(), PolicyLimitError> {
        if !placement.mig_caps.is_empty() {
            return Err(PolicyLimitError::MigCaps);
        }
        self.check_mode(placement.mode)?;
        let rule = self.rule;
        let held = self.held(ledger);
        if let Some(most) = rule.leases.filter(|most| held.len() >= *most as usize) {
            return Err(PolicyLimitError::Leases(most));
        }
        let Placement { devices, mig_devices, mode, sm, memory_bytes, .. } = placement;
        let (sm, memory) = sums(devices.len(), mig_devices, *mode, *sm, *memory_bytes);
        sum("sm", rule.sm.map(thousandths), held_sm(&held), sm, &percent)?;
        sum("memory", rule.memory, held_memory(&held), memory, &mib)
    }

    /// Thousandths of a percent of SMs, and bytes, that the user may still take in addition to their leases
    /// in `ledger`; `None`: not limited.
    pub fn room(&self, ledger: &Ledger) -> (Option<u64>, Option<u64>) {
        let held = self.held(ledger);
        let sm = self.rule.sm.map(|limit| thousandths(limit).saturating_sub(held_sm(&held)));
        (sm, self.rule.memory.map(|limit| limit.saturating_sub(held_memory(&held))))
    }

    fn held<'l>(&self, ledger: &'l Ledger) -> Vec<&'l Lease> {
        // Slurm limits the allocation of a job.
        let own = |lease: &&Lease| lease.container.uid == self.uid && lease.within.is_none();
        ledger.leases.iter().filter(own).collect()
    }

    /// The room that the user has in addition to their leases in `ledger`.
    pub fn left(&self, ledger: &Ledger) -> Left {
        let held = self.held(ledger);
        let (sm, memory_bytes) = self.room(ledger);
        let as_percent = |left| Percent::from_thousandths(u32::try_from(left).unwrap_or(u32::MAX)).as_f64();
        let leases = u32::try_from(held.len()).unwrap_or(u32::MAX);
        Left {
            sm_percent: sm.map(as_percent),
            memory_bytes,
            leases: self.rule.leases.map(|limit| limit.saturating_sub(leases)),
        }
    }
}

/// The room in a policy; `None`: the policy does not limit it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Left {
    /// Of `sm`.
    pub sm_percent: Option<f64>,
    /// Of `memory`.
    pub memory_bytes: Option<u64>,
    /// Of `leases`.
    pub leases: Option<u32>,
}

fn thousandths(sm: Percent) -> u64 {
    u64::from(sm.thousandths())
}

/// SM share and memory of a lease or a request on all its devices together; `None`: no limit. A container that has a MIG device
/// alone holds all of it, as part of its GPU, whatever it requested.
fn sums(
    devices: usize,
    mig_devices: &[LeasedMigDevice],
    mode: Mode,
    sm: Option<Percent>,
    memory_bytes: Option<u64>,
) -> (Option<u64>, Option<u64>) {
    if mode == Mode::Mig {
        let sm = mig_devices.iter().map(|mig_device| mig_device.sm.map(thousandths)).sum();
        return (sm, mig_devices.iter().map(|mig_device| mig_device.memory_bytes).sum());
    }
    let times = |one: u64| one.saturating_mul(devices as u64);
    (sm.map(thousandths).map(times), memory_bytes.map(times))
}

fn sums_of(lease: &Lease) -> (Option<u64>, Option<u64>) {
    // One that moves has two for a moment.
    let devices = lease.devices.len() - usize::from(lease.destination().is_some());
    sums(devices, &lease.mig_devices, lease.mode, lease.sm, lease.memory_bytes)
}

/// A lease without a limit holds a whole device.
fn held_sm(held: &[&Lease]) -> u64 {
    let whole = |lease: &Lease| thousandths(Percent::WHOLE).saturating_mul(lease.devices.len() as u64);
    held.iter().map(|lease| sums_of(lease).0.unwrap_or(whole(lease))).fold(0, u64::saturating_add)
}

/// A lease without a limit holds all memory.
fn held_memory(held: &[&Lease]) -> u64 {
    held.iter().map(|lease| sums_of(lease).1.unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
}

fn sum(
    key: &'static str,
    limit: Option<u64>,
    held: u64,
    asked: Option<u64>,
    show: &dyn Fn(u64) -> String,
) -> Result<(), PolicyLimitError> {
    let Some(limit) = limit else { return Ok(()) };
    let Some(asked) = asked else { return Err(PolicyLimitError::Unlimited(key, show(limit))) };
    if held.saturating_add(asked) <= limit {
        return Ok(());
    }
    let temporary = asked <= limit;
    Err(PolicyLimitError::Sum { key, limit: show(limit), held: show(held), asked: show(asked), temporary })
}

fn percent(thousandths: u64) -> String {
    format!("{} %", Percent::from_thousandths(u32::try_from(thousandths).unwrap_or(u32::MAX)))
}

fn mib(bytes: u64) -> String {
    if bytes == u64::MAX { "all there is".to_owned() } else { format!("{} MiB", bytes / MIB) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::fixture::lease;
    use crate::place::fixture::request;
    use crate::share::{Isolation, Priority, Suspend};

    fn placement(mode: Mode, sm: Option<u32>, mib: Option<u64>) -> Placement {
        Placement {
            devices: vec!["GPU-a".into()],
            mig_devices: Vec::new(),
            mode,
            isolation: Isolation::Shared,
            daemon: None,
            sm: sm.map(|sm| Percent::from_thousandths(sm * 1000)),
            memory_bytes: mib.map(|mib| mib << 20),
            processes: 1,
            priority: Priority::Normal,
            guard: None,
            suspend: Suspend::Never,
            mig_caps: Vec::new(),
            refresh_first: false,
            neighbours: None,
            warnings: Vec::new(),
        }
    }

    /// User 1000 holds 25 % and 4 GiB; another user holds the rest.
    fn ledger() -> Ledger {
        let mut mine = lease(1, "GPU-a");
        mine.container.uid = 1000;
        (mine.sm, mine.memory_bytes) = (Some(Percent::from_thousandths(25_000)), Some(4 << 30));
        let mut theirs = lease(2, "GPU-a");
        theirs.container.uid = 1001;
        (theirs.sm, theirs.memory_bytes) = (None, None);
        Ledger { leases: vec![mine, theirs], ..Ledger::empty("boot") }
    }

    fn check(rule: &PolicyRule, placement: &Placement) -> Result<(), String> {
        PolicyLimit { uid: 1000, rule }.check(placement, &ledger()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_share_without_a_cap_is_free() {
        let any = PolicyRule { user: Some("a".into()), ..PolicyRule::default() };
        assert_eq!(check(&any, &placement(Mode::Exclusive, None, None)), Ok(()));
    }

    #[test]
    fn caps_are_for_all_that_one_user_holds() {
        let rule = PolicyRule {
            modes: Some(vec![Mode::Mps]),
            sm: Some(Percent::from_thousandths(50_000)),
            memory: Some(6 << 30),
            leases: Some(2),
            ..PolicyRule::default()
        };
        let cases = [
            (placement(Mode::Mps, Some(25), Some(2048)), Ok(())),
            (
                placement(Mode::TimeSlice, Some(25), Some(2048)),
                Err(
                    "your policy allows mps, and this is time-slice; fix: set sublet.mode to one that it allows",
                ),
            ),
            (
                placement(Mode::Mps, Some(26), Some(2048)),
                Err(
                    "your policy limits sm to 50 %; why: your containers hold 25 %, and this one asks for 26 %; \
                     fix: end a container first",
                ),
            ),
            (
                placement(Mode::Mps, Some(51), Some(2048)),
                Err(
                    "your policy limits sm to 50 %; why: your containers hold 25 %, and this one asks for 51 %; \
                     fix: ask for less",
                ),
            ),
            (
                placement(Mode::Mps, None, Some(2048)),
                Err(
                    "your policy limits sm to 50 %, and this names no limit; fix: say with sublet.sm how much it \
                     takes",
                ),
            ),
            (
                placement(Mode::Mps, Some(25), Some(2049)),
                Err(
                    "your policy limits memory to 6144 MiB; why: your containers hold 4096 MiB, and this one \
                     asks for 2049 MiB; fix: end a container first",
                ),
            ),
            (
                placement(Mode::Mps, Some(25), None),
                Err(
                    "your policy limits memory to 6144 MiB, and this names no limit; fix: say with sublet.memory \
                     how much it takes",
                ),
            ),
        ];
        for (placement, expected) in cases {
            assert_eq!(check(&rule, &placement), expected.map_err(str::to_owned), "{placement:?}");
        }
    }

    #[test]
    fn a_mode_that_is_not_allowed_is_refused_before_any_device_is_examined() {
        let rule = PolicyRule { modes: Some(vec![Mode::Mps, Mode::Mig]), ..PolicyRule::default() };
        let limit = PolicyLimit { uid: 1000, rule: &rule };
        let asked = |mode, config: &Config| {
            limit
                .check_request(&Request { mode, ..request(Mode::Mps) }, config)
                .map_err(|why| why.to_string())
        };
        let open = Config::default();
        let refusal = asked(Some(Mode::TimeSlice), &open).unwrap_err();
        assert!(
            refusal.starts_with("your policy allows mps, mig, and this is time-slice; fix: "),
            "{refusal}"
        );
        assert_eq!(asked(None, &open), Err(refusal), "the default mode is time-slice");
        assert_eq!(asked(Some(Mode::Mps), &open), Ok(()));
        let uses = crate::place::tests::rule("0", Use::Mps);
        assert_eq!(asked(None, &uses), Ok(()), "the device decides");
    }

    #[test]
    fn the_number_of_leases_is_capped_and_waiting_helps_but_where_there_may_be_none() {
        let rule = |leases| PolicyRule { leases: Some(leases), ..PolicyRule::default() };
        let mps = placement(Mode::Mps, Some(25), None);
        let refused =
            |leases| PolicyLimit { uid: 1000, rule: &rule(leases) }.check(&mps, &ledger()).unwrap_err();
        assert_eq!(refused(1), PolicyLimitError::Leases(1));
        assert!(refused(1).is_temporary() && !refused(0).is_temporary());
        assert_eq!(refused(0).to_string(), "your policy limits your containers to 0; fix: ask root");
        assert_eq!(refused(1).to_string(), "your policy limits your containers to 1; fix: end one first");
        assert_eq!(check(&rule(2), &mps), Ok(()));
    }

    #[test]
    fn a_mig_device_alone_counts_with_its_own_size() {
        let rule = PolicyRule {
            sm: Some(Percent::from_thousandths(50_000)),
            memory: Some(10 << 30),
            ..PolicyRule::default()
        };
        let mig_device = LeasedMigDevice {
            uuid: "MIG-a".into(),
            gpu: "GPU-a".into(),
            gi: 1,
            ci: 0,
            placement: None,
            sm: Some(Percent::from_thousandths(20_000)),
            memory_bytes: Some(5 << 30),
        };
        // It requested at least one percent and gets a fifth.
        let mut asked =
            Placement { mig_devices: vec![mig_device.clone()], ..placement(Mode::Mig, Some(1), None) };
        assert_eq!(check(&rule, &asked), Ok(()));
        asked.mig_devices[0].sm = Some(Percent::from_thousandths(25_001));
        assert!(check(&rule, &asked).unwrap_err().contains("hold 25 %, and this one asks for 25.001 %"));
        let mut held = lease(1, "MIG-a");
        (held.mode, held.mig_devices, held.container.uid) = (Mode::Mig, vec![mig_device.clone()], 1000);
        let ledger = Ledger { leases: vec![held.clone()], ..Ledger::empty("boot") };
        let left = PolicyLimit { uid: 1000, rule: &rule }.left(&ledger);
        assert_eq!((left.sm_percent, left.memory_bytes), (Some(30.0), Some(5 << 30)));
        asked.mig_devices = vec![mig_device.clone(), mig_device];
        let both = PolicyLimit { uid: 1000, rule: &rule }.check(&asked, &ledger).unwrap_err().to_string();
        assert!(both.contains("hold 20 %, and this one asks for 40 %"), "{both}");
    }

    #[test]
    fn a_lease_on_two_devices_counts_twice() {
        let rule = PolicyRule { memory: Some(8 << 30), ..PolicyRule::default() };
        let mut both = placement(Mode::Mps, None, Some(2048));
        assert_eq!(check(&rule, &both), Ok(()));
        both.devices.push("GPU-b".into());
        assert_eq!(check(&rule, &both), Ok(()));
        both.memory_bytes = Some(2049 << 20);
        assert!(check(&rule, &both).unwrap_err().contains("asks for 4098 MiB"));
    }
}
