//! The jobs: what each asks of a GPU and how long it runs. The mixes are this project's own, not those of a trace.

/// What a kind of job asks of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// How many of a hundred jobs are of this kind.
    pub weight: usize,
    /// Percent of a GPU's SMs; 100: the whole GPU, alone.
    pub sm: u32,
    /// GiB of GPU memory.
    pub gib: u64,
}

/// A mix of jobs.
pub struct Mix {
    /// Its name in table and picture.
    pub name: &'static str,
    /// Its kinds of jobs; their weights add up to 100.
    pub kinds: &'static [Kind],
}

const fn kind(weight: usize, sm: u32, gib: u64) -> Kind {
    Kind { weight, sm, gib }
}

/// All mixes.
pub const MIXES: [Mix; 4] = [
    Mix { name: "notebooks", kinds: &[kind(50, 10, 8), kind(30, 15, 16), kind(15, 25, 32), kind(5, 50, 64)] },
    Mix {
        name: "inference",
        kinds: &[kind(25, 10, 12), kind(35, 20, 24), kind(25, 40, 40), kind(15, 100, 120)],
    },
    Mix { name: "training", kinds: &[kind(15, 25, 32), kind(25, 50, 64), kind(60, 100, 120)] },
    Mix {
        name: "mixed",
        kinds: &[
            kind(30, 10, 8),
            kind(20, 20, 24),
            kind(15, 25, 32),
            kind(10, 40, 40),
            kind(10, 50, 64),
            kind(15, 100, 120),
        ],
    },
];

/// One job.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Percent of a GPU's SMs.
    pub sm: u32,
    /// GiB of GPU memory.
    pub gib: u64,
    /// How long it runs, in minutes.
    pub minutes: u32,
}

/// `SplitMix64`: the same numbers in every run.
pub struct Random(pub u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % limit as u64).unwrap()
    }

    /// The next job of `mix`: 20 to 220 minutes, each as likely.
    pub fn job(&mut self, mix: &Mix) -> Job {
        let mut left = self.below(100);
        let minutes = 20 + u32::try_from(self.below(201)).unwrap();
        for kind in mix.kinds {
            if left < kind.weight {
                return Job { sm: kind.sm, gib: kind.gib, minutes };
            }
            left -= kind.weight;
        }
        unreachable!("the weights of {} are less than 100", mix.name)
    }
}
