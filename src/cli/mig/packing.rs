//! Finds places for instances that overlap neither each other nor instances that stay.

use super::Span;

/// Equal pieces.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// Where one may lie.
    pub places: Vec<Span>,
    /// How many there are.
    pub count: usize,
}

/// A placed piece: the index of its group, and its place.
pub(super) type Placed = (usize, Span);

/// How arrangements are compared.
pub(super) struct Terms<'a> {
    /// The cost of a piece of that group in that place; `None` if it must not lie there.
    pub price: &'a dyn Fn(usize, Span) -> Option<u32>,
    /// Of two arrangements with the same cost, the one with the greater worth wins.
    pub worth: &'a dyn Fn(&[Placed]) -> Vec<u32>,
}

/// The cheapest arrangement of all pieces that uses each place of `fixed`, with its cost.
pub(super) fn arrange(groups: &[Group], fixed: &[Span], terms: &Terms<'_>) -> Option<(u32, Vec<Placed>)> {
    let left: Vec<usize> = groups.iter().map(|group| group.count).collect();
    let mut search = Search { groups, fixed, terms, best: None };
    search.from(0, &mut left.clone(), &mut Vec::new(), 0);
    search.best.map(|best| (best.cost, best.placed))
}

struct Best {
    cost: u32,
    worth: Vec<u32>,
    placed: Vec<Placed>,
}

struct Search<'a> {
    groups: &'a [Group],
    fixed: &'a [Span],
    terms: &'a Terms<'a>,
    best: Option<Best>,
}

impl Search<'_> {
    /// Places the pieces that are `left` at `start` or after, from left to right, so that each arrangement occurs
    /// once.
    fn from(&mut self, start: u32, left: &mut [usize], placed: &mut Vec<Placed>, cost: u32) {
        if self.best.as_ref().is_some_and(|best| cost > best.cost) {
            return;
        }
        if left.iter().all(|&count| count == 0) {
            if !self.skips(start, u32::MAX) {
                self.keep(cost, placed);
            }
            return;
        }
        for group in 0..left.len() {
            if left[group] == 0 {
                continue;
            }
            for place in 0..self.groups[group].places.len() {
                let span = self.groups[group].places[place];
                let collides = self.fixed.iter().any(|&fixed| fixed != span && fixed.overlaps(span));
                if span.start < start || self.skips(start, span.start) || collides {
                    continue;
                }
                let Some(price) = (self.terms.price)(group, span) else { continue };
                left[group] -= 1;
                placed.push((group, span));
                self.from(span.end(), left, placed, cost + price);
                placed.pop();
                left[group] += 1;
            }
        }
    }

    /// Whether a fixed place between `from` and `to` would stay empty.
    fn skips(&self, from: u32, to: u32) -> bool {
        self.fixed.iter().any(|fixed| (from..to).contains(&fixed.start))
    }

    fn keep(&mut self, cost: u32, placed: &[Placed]) {
        let worth = (self.terms.worth)(placed);
        let is_better = |best: &Best| cost < best.cost || cost == best.cost && worth > best.worth;
        if self.best.as_ref().is_none_or(is_better) {
            self.best = Some(Best { cost, worth, placed: placed.to_vec() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(starts: &[u32], size: u32, count: usize) -> Group {
        Group { places: starts.iter().map(|&start| Span { start, size }).collect(), count }
    }

    fn cheapest(groups: &[Group], fixed: &[Span], dear: u32) -> Option<(u32, Vec<(usize, u32)>)> {
        let price = |_: usize, span: Span| Some(u32::from(span.start == dear));
        let terms = Terms { price: &price, worth: &|_| Vec::new() };
        let (cost, placed) = arrange(groups, fixed, &terms)?;
        Some((cost, placed.into_iter().map(|(group, span)| (group, span.start)).collect()))
    }

    #[test]
    fn a_narrow_piece_makes_way_for_a_wide_one() {
        let groups = [group(&[0, 1, 2, 3], 1, 2), group(&[0, 2], 2, 1)];
        assert_eq!(cheapest(&groups, &[], 9), Some((0, vec![(0, 0), (0, 1), (1, 2)])));
        assert_eq!(
            cheapest(&groups, &[Span { start: 3, size: 1 }], 9),
            Some((0, vec![(1, 0), (0, 2), (0, 3)]))
        );
        assert_eq!(cheapest(&groups, &[], 1).unwrap().0, 0, "the dear place is avoided");
        let full = [group(&[0, 1, 2, 3], 1, 3), group(&[0, 2], 2, 1)];
        assert_eq!(cheapest(&full, &[], 9), None);
    }

    #[test]
    fn a_fixed_place_is_used_or_there_is_no_arrangement() {
        let ones = [group(&[0, 1], 1, 1)];
        assert_eq!(cheapest(&ones, &[Span { start: 1, size: 1 }], 1), Some((1, vec![(0, 1)])));
        assert_eq!(cheapest(&ones, &[Span { start: 3, size: 1 }], 9), None);
        assert_eq!(cheapest(&ones, &[Span { start: 0, size: 2 }], 9), None);
        assert_eq!(cheapest(&[], &[], 9), Some((0, vec![])));
        assert_eq!(cheapest(&[], &[Span { start: 0, size: 2 }], 9), None);
    }

    #[test]
    fn of_equal_costs_the_worthier_wins() {
        let terms = Terms { price: &|_, _| Some(0), worth: &|placed| vec![placed[0].1.start] };
        let (_, placed) = arrange(&[group(&[0, 5, 3], 1, 1)], &[], &terms).unwrap();
        assert_eq!(placed, [(0, Span { start: 5, size: 1 })]);
    }
}
