//! Any process may be killed between any two steps.

use super::changing::Change;
use super::{Pc, State, Step, Turn};

impl Turn<'_> {
    pub(super) fn crashes(&mut self) {
        if self.before.crashes == 0 {
            return;
        }
        for who in 0..self.before.pcs.len() {
            if self.before.pcs[who] == Pc::Off {
                continue;
            }
            self.crash("it is killed", who, |state| {
                state.pcs[who] = Pc::Off;
                if let Some(change) = state.change.as_mut().filter(|change| change.by == Some(who)) {
                    change.by = None;
                }
            });
        }
        let waiter = self.model.waiter;
        if self.before.change.is_some() {
            self.crash("`sublet mig` is killed", 0, |state| {
                if let Some(Change { by: Some(who), order, .. }) = state.change.take() {
                    state.ended(who, order.map(|_| false), waiter);
                }
            });
        }
    }

    fn crash(&mut self, what: &'static str, of: usize, change: impl FnOnce(&mut State)) {
        let mut after = State { alone: false, ..*self.before };
        if after.crashes != u8::MAX {
            after.crashes -= 1;
        }
        change(&mut after);
        self.found.push((Step { what, of, call: None, crash: true }, after));
    }
}
