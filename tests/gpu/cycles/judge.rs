//! Whether what happened to each container was to be expected.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::plan::{Cycle, Ending, Share, Use};

/// After a fault a server takes no new client until all of that moment have ended (docs/evidence); a killed one is
/// started anew by the next container or by `sublet serve`. Then so long for what was under way.
const RECOVERY: Duration = Duration::from_secs(1);

pub(super) const HEADING: &str = "| use of the GPU | containers | ended as planned | failed with a neighbour's fault or \
    server | unexpected | seconds |\n|---|---|---|---|---|---|";

/// What was seen of one container.
pub(super) struct Life {
    number: u64,
    cycle: Cycle,
    began: Instant,
    pub ended: Instant,
    /// When it began to fault, or something was killed.
    pub harm_began: Option<Instant>,
    /// The program's last word; none: the container never came to be.
    pub result: Option<String>,
    pub delete_failed: Option<String>,
}

impl Life {
    pub fn new(number: u64, cycle: Cycle) -> Self {
        let now = Instant::now();
        Self { number, cycle, began: now, ended: now, harm_began: None, result: None, delete_failed: None }
    }

    /// Whether its own cycle explains what became of it.
    fn is_as_planned(&self) -> bool {
        let word = self.result.as_deref();
        match self.cycle.ending {
            Ending::Finished => word == Some("CUDA_SUCCESS"),
            Ending::ShimKilled => word.is_none(),
            Ending::Killed => word == Some("ended while it computed"),
            Ending::Fault => word == Some("CUDA_ERROR_ILLEGAL_ADDRESS"),
            // Its clients learn of it with their next call to the driver.
            Ending::DaemonKilled | Ending::ServerKilled => {
                word.is_some_and(|word| word.starts_with("CUDA_ERROR"))
            }
        }
    }

    /// When it hurts others on its server: from then on until those of that moment have ended.
    fn harm(&self, lives: &[Self]) -> Option<(Instant, Instant)> {
        let harms = matches!(self.cycle.ending, Ending::Fault | Ending::DaemonKilled | Ending::ServerKilled);
        let began = self.harm_began.filter(|_| harms)?;
        let then = lives.iter().filter(|life| life.began <= began && life.ended >= began);
        let last = then.map(|life| life.ended).max().unwrap_or(self.ended);
        Some((began, last.max(self.ended) + RECOVERY))
    }

    fn met(&self, (from, until): (Instant, Instant)) -> bool {
        self.began <= until && self.ended >= from
    }
}

/// Prints the row of one use and its surprises; whether there are none.
pub(super) fn row(usage: &Use, lives: &[Life], took: Duration) -> bool {
    let harms: Vec<_> = lives.iter().filter_map(|life| life.harm(lives)).collect();
    let (mut planned, mut hurt, mut surprises) = (0, 0, Vec::new());
    let mut words: BTreeMap<(Ending, String), usize> = BTreeMap::new();
    let mut shares: BTreeMap<Share, usize> = BTreeMap::new();
    for life in lives {
        let word = life.result.clone().unwrap_or_else(|| "-".to_owned());
        *words.entry((life.cycle.ending, word)).or_default() += 1;
        *shares.entry(life.cycle.share).or_default() += 1;
        if life.is_as_planned() {
            planned += 1;
        } else if usage.is_shared && harms.iter().any(|harm| life.met(*harm)) {
            hurt += 1;
        } else {
            surprises.push(format!("cycle {} {:?}: {:?}", life.number, life.cycle, life.result));
        }
        surprises
            .extend(life.delete_failed.iter().map(|text| format!("cycle {}: delete: {text}", life.number)));
    }
    println!(
        "| {} | {} | {planned} | {hurt} | {} | {:.0} |",
        usage.name,
        lives.len(),
        surprises.len(),
        took.as_secs_f64()
    );
    for (share, count) in &shares {
        eprintln!("  {count} x {share:?}");
    }
    for ((ending, word), count) in &words {
        eprintln!("  {count} x {ending:?}: {word}");
    }
    for surprise in &surprises {
        eprintln!("  UNEXPECTED {surprise}");
    }
    surprises.is_empty()
}
