//! The cluster: it counts and chooses a node, and the node decides.

use std::collections::BTreeMap;

use crate::jobs::{Job, Mix, Random};
use crate::node::{GPUS, Node, Way};

/// Nodes of the fleet.
const NODES: u32 = 4;
/// Minutes before counting begins: twice the longest job.
const WARM_UP: u32 = 440;
/// Minutes that count: a day.
const COUNTED: u32 = 1440;
/// Where the jobs come from.
const SEED: u64 = 19;

/// What came of a mix, a way and a load.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// SMs that running jobs asked for, of all the fleet's, in thousandths.
    pub used_tenths: u64,
    /// Jobs that arrived.
    pub jobs: u64,
    /// Those for which no node had room, in thousandths. They go away: nobody waits.
    pub refused_tenths: u64,
    /// The fleet's SMs that were free when a job was refused, in thousandths; the mean.
    pub stranded_tenths: u64,
    /// Of the jobs that a node was chosen for by its count, those that it refused, in thousandths: no GPU of it had room.
    pub misled_tenths: u64,
}

/// What is counted.
#[derive(Default)]
struct Counts {
    used: u64,
    jobs: u64,
    refused: u64,
    free_then: u64,
    sent: u64,
    misled: u64,
}

struct Cluster {
    way: Way,
    nodes: Vec<Node>,
    counts: Counts,
}

impl Cluster {
    /// The nodes that count enough for `job`, in the order in which they are tried.
    fn order(&self, job: &Job) -> Vec<usize> {
        let counts = |node: &usize| !self.way.counts() || self.nodes[*node].counted_free() >= job.sm;
        let mut order: Vec<usize> = (0..self.nodes.len()).filter(counts).collect();
        // Both are stable: of equal nodes the first.
        match self.way {
            Way::Spread => order.sort_by_key(|node| u32::MAX - self.nodes[*node].counted_free()),
            Way::Whole | Way::Mig | Way::Binpack => {
                order.sort_by_key(|node| self.nodes[*node].counted_free());
            }
        }
        order
    }

    /// Starts `job` on the first node that has room, and returns which.
    fn start(&mut self, id: u64, job: &Job) -> Option<usize> {
        self.counts.jobs += 1;
        for node in self.order(job) {
            self.counts.sent += 1;
            if self.nodes[node].start(id, job) {
                return Some(node);
            }
            self.counts.misled += 1;
        }
        self.counts.refused += 1;
        self.counts.free_then += u64::from(NODES * GPUS * 100) - self.used();
        None
    }

    fn used(&self) -> u64 {
        self.nodes.iter().map(|node| u64::from(node.used())).sum()
    }
}

/// Runs `mix` by `way`, with `load` percent of the fleet's SMs asked for.
pub fn run(mix: &Mix, way: Way, load: u32) -> Outcome {
    let nodes = (0..NODES).map(|_| Node::new(way)).collect();
    let mut cluster = Cluster { way, nodes, counts: Counts::default() };
    let (mut random, mut ending) = (Random(SEED), BTreeMap::<u32, Vec<(usize, u64)>>::new());
    // SM percents times minutes that are still to arrive; the jobs are the same for every way.
    let (mut credit, mut id) = (0_i64, 0);
    for minute in 0..WARM_UP + COUNTED {
        for (node, ended) in ending.remove(&minute).unwrap_or_default() {
            cluster.nodes[node].end(ended);
        }
        credit += i64::from(NODES * GPUS * load);
        while credit > 0 {
            let job = random.job(mix);
            credit -= i64::from(job.sm) * i64::from(job.minutes);
            id += 1;
            if let Some(node) = cluster.start(id, &job) {
                ending.entry(minute + job.minutes).or_default().push((node, id));
            }
        }
        if minute + 1 == WARM_UP {
            cluster.counts = Counts::default();
        }
        cluster.counts.used += cluster.used();
    }
    outcome(&cluster.counts)
}

fn outcome(counts: &Counts) -> Outcome {
    let all = u64::from(NODES * GPUS * 100);
    let thousandths = |part: u64, whole: u64| (part * 1000 + whole / 2) / whole.max(1);
    Outcome {
        used_tenths: thousandths(counts.used, all * u64::from(COUNTED)),
        jobs: counts.jobs,
        refused_tenths: thousandths(counts.refused, counts.jobs),
        stranded_tenths: thousandths(counts.free_then, all * counts.refused.max(1)),
        misled_tenths: thousandths(counts.misled, counts.sent),
    }
}
