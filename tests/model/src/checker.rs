//! Visits every reachable state, breadth first, so that the first counterexample is a shortest one.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque, btree_map};
use std::fmt::{self, Debug, Display};
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A protocol.
pub trait Model {
    /// Everything that decides what may happen next.
    type State: Copy + Eq + Hash + Debug;
    /// What leads from one state to the next.
    type Step: Copy + Debug;

    /// How it begins.
    fn initial(&self) -> Self::State;
    /// Every step that is possible in `state`, with the state after it.
    fn steps(&self, state: &Self::State, found: &mut Vec<(Self::Step, Self::State)>);
    /// The invariant that `state` breaks.
    fn broken(&self, state: &Self::State) -> Option<&'static str>;
    /// Whether the step is a crash. No process needs crashes to come to its end.
    fn is_crash(&self, step: &Self::Step) -> bool;
    /// Whether all that began has ended.
    fn is_end(&self, state: &Self::State) -> bool;
}

/// A protocol with states that differ only in names, or in what nothing asks for any more.
///
/// States are alike if what a search finds from one of them it finds from the other: the same invariant is broken or none,
/// both are an end or neither, and for each step of one the other has a step to a state that is alike.
pub trait Alike: Model {
    /// New names for what is interchangeable.
    type Names;

    /// All ways to exchange names; with each two of them, also the one after the other.
    fn names(&self) -> Vec<Self::Names>;
    /// `state` without what nothing asks for any more.
    fn forgotten(&self, state: &Self::State) -> Self::State;
    /// `state` with other names.
    fn renamed(&self, state: &Self::State, names: &Self::Names) -> Self::State;
}

/// Steps, each with the state after it.
pub type Way<M> = Vec<(<M as Model>::Step, <M as Model>::State)>;

/// What a search found.
#[derive(Debug)]
pub struct Report<M: Model> {
    /// Distinct states.
    pub unique: usize,
    /// States generated, each one as often as a step leads to it.
    pub total: usize,
    /// Steps of the longest of the shortest ways to a state.
    pub depth: usize,
    /// The invariant that is broken, and the shortest way to it.
    pub broken: Option<(&'static str, Way<M>)>,
}

impl<M: Model> Display for Report<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>9} states, {:>9} generated, depth {:>3}", self.unique, self.total, self.depth)
    }
}

/// What is remembered of a state: the state before it, by number, and the step's place among its steps.
#[derive(Clone, Copy)]
struct From {
    state: u32,
    step: u16,
}

/// Visits all states of `model`, until an invariant is broken. With `ends`, also checks that from each of them all
/// processes can come to their end without another crash.
///
/// States are told apart by a hash of 64 bits. With ten million states the chance that two have the same is below
/// 1 : 300,000.
///
/// # Panics
/// There are 2^32 states.
pub fn check<M: Model>(model: &M, ends: bool) -> Report<M> {
    search(model, ends, fingerprint)
}

/// As [`check`], but of states that are alike it visits only the first one it finds. The chance that two that are not alike
/// have the same hash is up to four times as large.
///
/// # Panics
/// There are 2^32 states.
pub fn check_alike<M: Alike>(model: &M, ends: bool) -> Report<M> {
    search(model, ends, fingerprint_alike(model))
}

/// States that are alike have the same fingerprint: the least of theirs.
pub fn fingerprint_alike<M: Alike>(model: &M) -> impl Fn(&M::State) -> u64 {
    let names = model.names();
    move |state| {
        let state = model.forgotten(state);
        let renamed = names.iter().map(|names| fingerprint(&model.renamed(&state, names)));
        renamed.min().unwrap_or_default()
    }
}

fn search<M: Model>(model: &M, ends: bool, fingerprint: impl Fn(&M::State) -> u64) -> Report<M> {
    let initial = model.initial();
    let mut seen: HashMap<u64, u32, BuildHasherDefault<Plain>> = HashMap::default();
    let mut from = vec![From { state: 0, step: 0 }];
    let (mut edges, mut goals) = (Vec::new(), Vec::new());
    let mut open = VecDeque::from([(0, 0, initial)]);
    seen.insert(fingerprint(&initial), 0);
    let (mut total, mut depth) = (1, 0);
    let mut steps = Vec::new();
    while let Some((number, level, state)) = open.pop_front() {
        depth = level;
        if let Some(name) = model.broken(&state) {
            let way = way(model, &from, number);
            return Report { unique: from.len(), total, depth, broken: Some((name, way)) };
        }
        if ends && model.is_end(&state) {
            goals.push(number);
        }
        steps.clear();
        model.steps(&state, &mut steps);
        total += steps.len();
        for (index, (step, next)) in (0..).zip(&steps) {
            let new = u32::try_from(from.len()).expect("fewer than 2^32 states fit into memory");
            let known = match seen.entry(fingerprint(next)) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(vacant) => {
                    vacant.insert(new);
                    from.push(From { state: number, step: index });
                    open.push_back((new, level + 1, *next));
                    new
                }
            };
            if ends && !model.is_crash(step) {
                edges.push((known, number));
            }
        }
    }
    let stuck = if ends { cannot_reach(&goals, &edges, from.len()) } else { None };
    let broken = stuck.map(|state| ("every process comes to its end", way(model, &from, state)));
    Report { unique: from.len(), total, depth, broken }
}

/// For each key of a step that `key` tells, a shortest way that ends with such a step, with the states after each of its
/// steps. Steps without a key are not taken. The search ends when `patience` states have brought no new key.
///
/// # Panics
/// There are 2^32 states.
pub fn ways<M: Model, K: Ord>(
    model: &M,
    patience: usize,
    key: impl Fn(&M::State, &M::Step, &M::State) -> Option<K>,
) -> Vec<Way<M>> {
    let initial = model.initial();
    let mut seen: HashSet<u64, BuildHasherDefault<Plain>> = HashSet::default();
    let mut from = vec![From { state: 0, step: 0 }];
    let mut open = VecDeque::from([(0, initial)]);
    seen.insert(fingerprint(&initial));
    let (mut lasts, mut steps) = (BTreeMap::new(), Vec::new());
    let mut last_new = 0;
    while let Some((number, state)) = open.pop_front() {
        if from.len() - last_new > patience {
            break;
        }
        steps.clear();
        model.steps(&state, &mut steps);
        for (index, (step, next)) in (0..).zip(&steps) {
            let Some(key) = key(&state, step, next) else { continue };
            let last = From { state: number, step: index };
            if let btree_map::Entry::Vacant(vacant) = lasts.entry(key) {
                vacant.insert(last);
                last_new = from.len();
            }
            if seen.insert(fingerprint(next)) {
                open.push_back((u32::try_from(from.len()).expect("fewer than 2^32 states"), *next));
                from.push(last);
            }
        }
    }
    let mut found = Vec::new();
    for last in lasts.into_values() {
        from.push(last);
        found.push(way(model, &from, u32::try_from(from.len() - 1).expect("fewer than 2^32 states")));
    }
    found
}

/// Shows every state that can be reached, each once.
pub fn visit<M: Model>(model: &M, mut show: impl FnMut(&M::State)) {
    let initial = model.initial();
    let mut seen: HashSet<u64, BuildHasherDefault<Plain>> = HashSet::default();
    seen.insert(fingerprint(&initial));
    let (mut open, mut steps) = (vec![initial], Vec::new());
    while let Some(state) = open.pop() {
        show(&state);
        steps.clear();
        model.steps(&state, &mut steps);
        open.extend(steps.iter().map(|(_, next)| *next).filter(|next| seen.insert(fingerprint(next))));
    }
}

/// The first of `count` states from which no edge leads on to one of `goals`. `edges` are backwards: to, from.
fn cannot_reach(goals: &[u32], edges: &[(u32, u32)], count: usize) -> Option<u32> {
    // The edges by where they lead to: those to state n are from[ends[n - 1]..ends[n]]. Sorting takes twice as long.
    let mut ends = vec![0_u32; count];
    for (to, _) in edges {
        ends[*to as usize] += 1;
    }
    let mut sum = 0;
    for end in &mut ends {
        sum += std::mem::replace(end, sum);
    }
    let mut from = vec![0; edges.len()];
    for (to, before) in edges {
        let end = &mut ends[*to as usize];
        from[*end as usize] = *before;
        *end += 1;
    }
    let mut reaches = vec![false; count];
    let mut open = goals.to_vec();
    for goal in goals {
        reaches[*goal as usize] = true;
    }
    while let Some(state) = open.pop() {
        let state = state as usize;
        let first = if state == 0 { 0 } else { ends[state - 1] };
        for before in &from[first as usize..ends[state] as usize] {
            if !std::mem::replace(&mut reaches[*before as usize], true) {
                open.push(*before);
            }
        }
    }
    let stuck = reaches.iter().position(|reaches| !reaches);
    stuck.and_then(|state| u32::try_from(state).ok())
}

/// The steps to state `number`, with the states after them.
fn way<M: Model>(model: &M, from: &[From], mut number: u32) -> Way<M> {
    let mut choices = Vec::new();
    while number != 0 {
        let From { state, step } = from[number as usize];
        choices.push(step);
        number = state;
    }
    let (mut state, mut found) = (model.initial(), Vec::new());
    let mut way = Vec::new();
    for choice in choices.into_iter().rev() {
        found.clear();
        model.steps(&state, &mut found);
        let (step, next) = found[usize::from(choice)];
        way.push((step, next));
        state = next;
    }
    way
}

fn fingerprint<S: Hash>(state: &S) -> u64 {
    let mut hasher = Mixing::default();
    state.hash(&mut hasher);
    hasher.finish()
}

/// A quick hash: a multiplication whose halves are folded. Nearly all that a state has are small numbers: eight of them are
/// mixed at once.
#[derive(Default)]
struct Mixing {
    mixed: u64,
    small: u64,
    /// How many bits of `small` are used.
    bits: u32,
}

impl Mixing {
    fn mix(&mut self, word: u64) {
        self.mixed = folded(self.mixed ^ word);
    }

    fn add_small(&mut self, byte: u64) {
        self.small |= byte << self.bits;
        self.bits += 8;
        if self.bits == u64::BITS {
            self.mix(self.small);
            (self.small, self.bits) = (0, 0);
        }
    }

    fn add(&mut self, word: u64) {
        if word < 0xff {
            self.add_small(word);
        } else {
            self.add_small(0xff);
            self.mix(word);
        }
    }
}

impl Hasher for Mixing {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.add((*byte).into());
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.add(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        self.add(value);
    }

    fn write_usize(&mut self, value: usize) {
        self.add(value as u64);
    }

    /// What derived code hashes of an enum's variant.
    fn write_isize(&mut self, value: isize) {
        self.add(u64::try_from(value).unwrap_or(u64::MAX));
    }

    fn finish(&self) -> u64 {
        folded(folded(self.mixed ^ self.small) ^ u64::from(self.bits))
    }
}

fn folded(word: u64) -> u64 {
    let product = u128::from(word ^ 0x2d35_8dcc_aa6c_78a5) * 0x9e37_79b9_7f4a_7c15;
    u64::try_from((product ^ (product >> 64)) & u128::from(u64::MAX)).unwrap_or_default()
}

/// The keys are hashes already.
#[derive(Default)]
struct Plain(u64);

impl Hasher for Plain {
    fn write(&mut self, _: &[u8]) {}

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
