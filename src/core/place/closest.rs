//! Which of the GPUs that are alike in all else are joined most closely: for shares of several.

use crate::inventory::{Inventory, Join};

/// How far the GPUs of a set are apart: the longest way between two of them, and all ways together. The smallest is the best.
type Distance = (u32, u32);

/// The indices `ranked` into the inventory's devices, the best first, each with a key: those with one key are alike. The first
/// `count` of what is returned are as good as the first of `ranked`, and joined as closely as alike ones can be.
pub(super) fn prefer_joined<K: PartialEq>(
    ranked: &[(K, usize)],
    count: usize,
    inventory: &Inventory,
) -> Vec<usize> {
    let mut all: Vec<usize> = ranked.iter().map(|(_, index)| *index).collect();
    let Some((last, _)) = count.checked_sub(1).and_then(|last| ranked.get(last)) else { return all };
    let is_alike = |(key, _): &(K, usize)| key == last;
    let first = ranked.iter().position(is_alike).unwrap_or(count);
    let alike: Vec<usize> = ranked.iter().filter(|one| is_alike(one)).map(|(_, index)| *index).collect();
    if inventory.links.is_empty() || count < 2 || first + alike.len() <= count {
        return all;
    }
    // From each of them on, the next is always the one that is closest to those that there are.
    let sets = alike.iter().map(|seed| {
        let (mut set, mut distance) = (all[..first].to_vec(), (0, 0));
        let mut next = Some(*seed);
        while let Some(one) = next {
            distance = with(distance, &set, one, inventory);
            set.push(one);
            let rest = alike.iter().filter(|other| !set.contains(other));
            let closest = rest.min_by_key(|other| with(distance, &set, **other, inventory)).copied();
            next = closest.filter(|_| set.len() < count);
        }
        (distance, set)
    });
    let chosen = sets.min_by_key(|(distance, _)| *distance).map(|(_, set)| set).unwrap_or_default();
    // The rest stay behind them in their order.
    all.sort_by_key(|index| !chosen.contains(index));
    all
}

/// The distance of `set`, which is `distance`, with `one` more.
fn with(distance: Distance, set: &[usize], one: usize, inventory: &Inventory) -> Distance {
    let index = |at: usize| inventory.devices[at].index;
    // What is not known is farther than any other way.
    let unknown = Join::System as u32 + 1;
    let far = |other: &usize| inventory.join(index(one), index(*other)).map_or(unknown, |join| join as u32);
    set.iter().map(far).fold(distance, |(longest, all), way| (longest.max(way), all + way))
}

#[cfg(test)]
#[path = "closest_tests.rs"]
mod tests;
