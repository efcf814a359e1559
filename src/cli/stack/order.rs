//! Whether the order matters in which the containers of a stack start. Compose and systemd start side by side those that
//! do not depend on each other.

use std::collections::BTreeSet;
use std::io;

use super::{Fitted, NotPlaced, Outcome, Stack};
use sublet_core::text::safe;

/// What the start order changes, by the names of containers.
#[derive(Debug, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
pub struct Orders {
    /// Those that get their share in every start order that was tried.
    in_every_order: Vec<String>,
    /// Those that get none in the order of the file, and do in another.
    in_another_order: Vec<String>,
    /// The same in a sentence; `None`: the order changes nothing.
    #[serde(skip)]
    pub sentence: Option<String>,
}

/// The outcomes of `stack` in other orders than the one of the file, with which it was `fitted`. `place` places a stack;
/// no more than `most` containers are.
pub fn orders(
    stack: &Stack,
    fitted: &[Fitted],
    most: usize,
    place: impl Fn(&Stack) -> io::Result<Vec<Fitted>>,
) -> io::Result<Orders> {
    let gets_one =
        |one: &Fitted| matches!(one.outcome, Outcome::Fits(_) | Outcome::InTurns(_) | Outcome::Made(_));
    let asks = |one: &Fitted| gets_one(one) || matches!(one.outcome, Outcome::Not(NotPlaced::Refused(_)));
    let asking: Vec<usize> = (0..fitted.len()).filter(|at| asks(&fitted[*at])).collect();
    let (orders, are_all) = permuted(&asking, most);
    let mut fitting = Vec::new();
    for order in &orders {
        let services = order.iter().map(|at| stack.services[*at].clone()).collect();
        let placed = place(&Stack { services, own: stack.own.clone(), ..Stack::default() })?;
        let served = order.iter().zip(&placed).filter(|(_, one)| gets_one(one)).map(|(at, _)| *at);
        fitting.push(first_alike(stack, &asking, served));
    }
    let (in_file, always) = (&fitting[0], |at: &usize| fitting.iter().all(|these| these.contains(at)));
    let only_there = |at: &usize| !in_file.contains(at) && fitting.iter().any(|these| these.contains(at));
    let names = |some: &[usize], which: &dyn Fn(&usize) -> bool| -> Vec<String> {
        some.iter().filter(|at| which(at)).map(|at| safe(&stack.services[*at].name)).collect()
    };
    let (every, another) = (names(&asking, &always), names(&asking, &only_there));
    let lost = names(&asking, &|at| in_file.contains(at) && !always(at));
    let best = fitting.iter().zip(&orders).rev().filter(|(these, _)| !these.is_subset(in_file));
    // The first of several.
    let best = best.max_by_key(|(these, _)| these.len());
    let difference = match best {
        Some((these, order)) => {
            let more = names(&asking, &|at| these.contains(at) && !in_file.contains(at)).join(", ");
            format!("another, such as {}, would let {more} in", names(order, &|_| true).join(", "))
        }
        None => format!("in another, {} may not fit", lost.join(", ")),
    };
    let tried = if are_all { "every order".to_owned() } else { format!("all {} orders tried", orders.len()) };
    let sure = if every.is_empty() { "none".to_owned() } else { every.join(", ") };
    let sentence = format!("the start order decides: {difference}; in {tried} these fit: {sure}");
    let sentence = (best.is_some() || !lost.is_empty()).then_some(sentence);
    Ok(Orders { in_every_order: every, in_another_order: another, sentence })
}

/// As many containers as were `served`: of containers in `asking` that are alike, the first ones.
fn first_alike(stack: &Stack, asking: &[usize], served: impl Iterator<Item = usize>) -> BTreeSet<usize> {
    let mut first = BTreeSet::new();
    for at in served {
        let is_alike = |one: &&usize| stack.services[**one].of == stack.services[at].of;
        first.extend(asking.iter().filter(is_alike).find(|one| !first.contains(*one)).copied());
    }
    first
}

/// Orders of `containers` with `most` of them in all, first as they are, and whether these are all orders.
fn permuted(containers: &[usize], most: usize) -> (Vec<Vec<usize>>, bool) {
    let count = containers.len();
    let all = (1..=count).fold(1, usize::saturating_mul);
    let tried = all.min(most / (2 * count).max(1)).max(1);
    let some = (0..tried).map(|number| nth(containers.to_vec(), number));
    let both_ways = |order: Vec<usize>| [order.clone(), order.into_iter().rev().collect()];
    (some.flat_map(both_ways).collect(), tried == all)
}

/// An order of `rest`: 0 is its own, and up to its length the one that begins with that one.
fn nth(mut rest: Vec<usize>, mut number: usize) -> Vec<usize> {
    let mut order = Vec::new();
    while !rest.is_empty() {
        let at = number % rest.len();
        number /= rest.len();
        order.push(rest.remove(at));
    }
    order
}
