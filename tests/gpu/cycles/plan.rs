//! What each cycle does, made from the seed and the cycle's number alone: a failed run can be repeated.

/// Annotations of a share.
pub(super) type Share = &'static [(&'static str, &'static str)];

/// The shares that one use of a GPU allows beside each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub name: &'static str,
    /// Of every hundred cycles.
    pub percent: u64,
    /// Seven of any of these fit on a GPU of 80 GB at once.
    shares: &'static [Share],
    /// Whether its containers have one server in common, so that a fault reaches all of them.
    pub is_shared: bool,
}

pub(super) const USES: [Use; 3] = [
    Use {
        name: "one MPS server for all",
        percent: 60,
        shares: &[
            &[("sublet.sm", "14"), ("sublet.memory", "8GiB")],
            &[("sublet.sm", "12.5"), ("sublet.memory", "4GiB")],
            &[("sublet.sm", "10"), ("sublet.memory", "2GiB"), ("sublet.priority", "low")],
            &[("sublet.mode", "mps"), ("sublet.memory", "6GiB"), ("sublet.processes", "2")],
        ],
        is_shared: true,
    },
    Use {
        name: "time-slices, and MPS servers of their own",
        percent: 30,
        shares: &[
            &[("sublet.mode", "time-slice")],
            &[("sublet.mode", "time-slice"), ("sublet.memory", "4GiB")],
            &[("sublet.isolation", "dedicated"), ("sublet.sm", "30"), ("sublet.memory", "4GiB")],
        ],
        is_shared: false,
    },
    Use {
        name: "the whole GPU, one after the other",
        percent: 10,
        shares: &[&[("sublet.mode", "exclusive"), ("sublet.wait", "60s")]],
        is_shared: false,
    },
];

/// How a cycle ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Ending {
    /// The program computes and ends by itself.
    Finished,
    /// SIGKILL of the container's first process.
    Killed,
    /// SIGKILL of the shim before it has created the container.
    ShimKilled,
    /// The program uses an illegal address.
    Fault,
    /// SIGKILL of the MPS control daemon that serves the container.
    DaemonKilled,
    /// SIGKILL of the MPS server that serves the container.
    ServerKilled,
}

/// One container's life.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cycle {
    pub share: Share,
    pub ending: Ending,
    /// How long its program computes.
    pub holds_ms: u64,
    /// When the killed part is killed.
    pub after_ms: u64,
}

impl Cycle {
    pub fn of(seed: u64, number: u64, usage: &Use) -> Self {
        let mut random = Random(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let share = random.of(usage.shares);
        let has_server = share.iter().any(|(key, value)| *key != "sublet.mode" || *value == "mps")
            && !share.contains(&("sublet.mode", "exclusive"));
        let ending = match random.below(100) {
            0..70 => Ending::Finished,
            70..78 => Ending::ShimKilled,
            78..80 => Ending::Fault,
            80 if has_server => Ending::DaemonKilled,
            81 if has_server => Ending::ServerKilled,
            _ => Ending::Killed,
        };
        let after_ms = match ending {
            Ending::ShimKilled => random.below(12),
            _ => random.below(400),
        };
        Self { share, ending, holds_ms: 100 + random.below(500), after_ms }
    }
}

/// splitmix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn of(&mut self, shares: &[Share]) -> Share {
        let limit = u64::try_from(shares.len()).expect("a few");
        shares[usize::try_from(self.below(limit)).expect("as few")]
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}
