//! What is done under a daemon's lock: `sublet mps start`, `stop` and `rest`, and `adjust`.

use super::{Actor, After, Daemons, Errand, Gpu, Pc, State, Turn};
use crate::Mutation;
use crate::ledger::{Call, DaemonState, Limits};

/// What the holder of a daemon's lock does next. `start`: it is a `mps start`, and this is whether the daemon came up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are explained above")]
pub enum At {
    /// `start::serves_already`.
    ServesAlready,
    /// `launch::end` of what an earlier start left.
    EndLeftover,
    /// `compute_mode::enter` records the mode; `again`: under a daemon that waited.
    RecordMode { again: bool },
    /// `compute_mode::enter` sets the mode.
    SetMode { again: bool },
    /// `start::enter_again` ends.
    ModeEntered,
    /// The daemon's process is started; `changed`: the mode was changed for it.
    Launch { changed: bool },
    /// The ledger is read for the limits.
    ReadLimits { changed: bool },
    /// The daemon is told its limits.
    SetLimits { changed: bool, limits: Limits },
    /// The daemon is published and recorded.
    NoteServing { limits: Limits },
    /// `start::undo` ends the daemon.
    Undo { changed: bool },
    /// `start::undo` restores the mode.
    UndoMode,
    /// `start::undo` forgets the mode.
    UndoForgetMode,
    /// It is recorded as down.
    NoteDown,
    /// `start::stop_unwanted`.
    StopUnwanted { well: bool },
    /// `stop::claim`.
    ClaimStop { start: Option<bool> },
    /// `launch::end`.
    EndDaemon { start: Option<bool> },
    /// `compute_mode::restore` sets the mode.
    RestoreMode { start: Option<bool> },
    /// `compute_mode::restore` removes the record.
    ForgetMode { start: Option<bool> },
    /// `stop::forget`.
    ForgetDaemon { start: Option<bool> },
    /// `rest::rest_held` begins.
    LeaveMode { start: Option<bool> },
    /// The same as above, under a daemon that stays.
    RestMode { start: Option<bool> },
    /// The same as above, under a daemon that stays.
    RestForgetMode { start: Option<bool> },
    /// `make_ready` checks again, under the daemon's lock, that it serves.
    ServesStill,
    /// `adjust` begins.
    AdjustBegin,
    /// The daemon is told.
    Control { limits: Limits },
    /// `adjust` ends.
    AdjustEnd { limits: Limits },
}

impl Turn<'_> {
    /// The next step of who holds the lock of `device`.
    pub(super) fn hold(&mut self, device: usize) {
        let Some(holder) = self.before.locks[device] else { return };
        match holder.at {
            At::ServesAlready => self.serves_already(device),
            At::EndLeftover => self.act(device, "mps start: ends what is left", |gpu| {
                gpu.daemon = None;
                Next::At(At::RecordMode { again: false })
            }),
            At::RecordMode { again } => self.record_mode(device, again),
            At::SetMode { again } => self.set_mode(device, again),
            At::ModeEntered => {
                self.then(device, "mps start: mode entered", Call::ModeEntered(device), |_| {
                    Next::At(At::AdjustBegin)
                });
            }
            At::Launch { .. } | At::ReadLimits { .. } | At::SetLimits { .. } => {
                self.come_up(device, holder.at);
            }
            At::NoteServing { limits } => self.note_serving(device, limits),
            At::Undo { .. } | At::UndoMode | At::UndoForgetMode | At::NoteDown => {
                self.undo(device, holder.at);
            }
            At::StopUnwanted { well } => self.stop_unwanted(device, well),
            At::ClaimStop { .. } | At::EndDaemon { .. } | At::RestoreMode { .. } => {
                self.stop(device, holder.at);
            }
            At::ForgetMode { start } => {
                self.then(device, "mps stop: forgets the mode", Call::ForgetMode(device), |_| {
                    Next::At(At::ForgetDaemon { start })
                });
            }
            At::ForgetDaemon { start } => {
                self.then(device, "mps stop: forgets the daemon", Call::ForgetDaemon(device), |_| {
                    Next::Ends(start.is_none())
                });
            }
            At::LeaveMode { .. } | At::RestMode { .. } | At::RestForgetMode { .. } => {
                self.rest(device, holder.at);
            }
            At::ServesStill => self.serves_still(device),
            At::AdjustBegin => self.adjust_begin(device),
            At::Control { limits } => self.act(device, "adjust: the daemon is told", |gpu| {
                if gpu.daemon.is_none() {
                    return Next::Ends(false);
                }
                gpu.daemon = Some(limits);
                Next::At(At::AdjustEnd { limits })
            }),
            At::AdjustEnd { limits } => {
                self.then(device, "adjust ends", Call::AdjustEnd(device, limits), |_| Next::Ends(true));
            }
        }
    }

    fn serves_already(&mut self, device: usize) {
        let left = self.before.ledger.daemons[device].is_some_and(|daemon| daemon.mode_left);
        let wanted = self.before.ledger.is_wanted(device, &self.model.shares);
        if !self.before.serves(device) {
            let leftover = self.before.gpus[device].daemon.is_some();
            self.then(device, "mps start: claim", Call::ClaimStart(device), |done| match done {
                true if leftover => Next::At(At::EndLeftover),
                true => Next::At(At::RecordMode { again: false }),
                false => Next::Ends(false),
            });
            return;
        }
        self.then(device, "mps start: one serves already", Call::NoteAnswer(device), |_| {
            Next::At(if left && wanted { At::RecordMode { again: true } } else { At::AdjustBegin })
        });
    }

    fn record_mode(&mut self, device: usize, again: bool) {
        let next = if again { At::ModeEntered } else { At::Launch { changed: false } };
        if self.before.gpus[device].exclusive {
            let mut set = *self.before;
            set.go_on(self.model, device, Next::At(next));
            Turn { model: self.model, before: &set, found: self.found }.hold(device);
        } else if self.model.mutation == Some(Mutation::SetModeBeforeRecord) {
            self.act(device, "compute_mode::enter: sets", |gpu| {
                gpu.exclusive = true;
                Next::At(At::SetMode { again })
            });
        } else {
            self.then(device, "compute_mode::enter: records", Call::RecordMode(device), |_| {
                Next::At(At::SetMode { again })
            });
        }
    }

    fn set_mode(&mut self, device: usize, again: bool) {
        let next = if again { At::ModeEntered } else { At::Launch { changed: true } };
        if self.model.mutation == Some(Mutation::SetModeBeforeRecord) {
            self.then(device, "compute_mode::enter: records", Call::RecordMode(device), |_| Next::At(next));
            return;
        }
        self.act(device, "compute_mode::enter: sets", |gpu| {
            gpu.exclusive = true;
            Next::At(next)
        });
    }

    /// `start::run_daemon`.
    fn come_up(&mut self, device: usize, at: At) {
        let wanted = self.before.ledger.wanted(device, &self.model.shares).unwrap_or(Limits::NONE);
        match at {
            At::Launch { changed } => self.act(device, "mps start: launches", |gpu| {
                gpu.daemon = Some(Limits::NONE);
                Next::At(At::ReadLimits { changed })
            }),
            At::ReadLimits { changed } => self.act(device, "mps start: reads the limits", |_| {
                Next::At(At::SetLimits { changed, limits: wanted })
            }),
            At::SetLimits { changed, limits } => self.act(device, "mps start: sets the limits", |gpu| {
                if gpu.daemon.is_none() {
                    return Next::At(At::Undo { changed });
                }
                gpu.daemon = Some(limits);
                Next::At(At::NoteServing { limits })
            }),
            _ => {}
        }
    }

    fn note_serving(&mut self, device: usize, limits: Limits) {
        let (who, model) = (Actor::Holder(device), self.model);
        self.call(who, "mps start: it serves", Call::NoteServing(device, limits), |state, _| {
            // A daemon that was killed after it was asked is published, and lost.
            state.gpus[device].lost = state.gpus[device].daemon.is_none();
            state.go_on(model, device, Next::At(At::StopUnwanted { well: true }));
        });
    }

    fn undo(&mut self, device: usize, at: At) {
        match at {
            At::Undo { changed } => self.act(device, "mps start: undo", |gpu| {
                gpu.daemon = None;
                Next::At(if changed { At::UndoMode } else { At::NoteDown })
            }),
            At::UndoMode => self.act(device, "mps start: undo restores the mode", |gpu| {
                gpu.exclusive = false;
                Next::At(At::UndoForgetMode)
            }),
            At::UndoForgetMode => {
                self.then(device, "mps start: undo forgets the mode", Call::ForgetMode(device), |_| {
                    Next::At(At::NoteDown)
                });
            }
            _ => self.then(device, "mps start: down", Call::NoteDown(device), |_| {
                Next::At(At::StopUnwanted { well: false })
            }),
        }
    }

    /// `start::stop_unwanted`.
    fn stop_unwanted(&mut self, device: usize, well: bool) {
        let start = Some(well);
        if well && self.before.waits(device, self.model) {
            self.rest(device, At::LeaveMode { start });
        } else {
            self.stop(device, At::ClaimStop { start });
        }
    }

    /// `stop::stop_held`.
    fn stop(&mut self, device: usize, at: At) {
        let recorded = self.before.ledger.compute_modes[device];
        match at {
            At::ClaimStop { start } => {
                self.then(device, "mps stop: claim", Call::ClaimStop(device), |done| {
                    // A start finds the daemon in use if all is well.
                    if done { Next::At(At::EndDaemon { start }) } else { Next::Ends(start.unwrap_or(false)) }
                });
            }
            At::EndDaemon { start } => self.act(device, "mps stop: ends the daemon", |gpu| {
                gpu.daemon = None;
                Next::At(if recorded { At::RestoreMode { start } } else { At::ForgetDaemon { start } })
            }),
            At::RestoreMode { start } => self.act(device, "mps stop: restores the mode", |gpu| {
                gpu.exclusive = false;
                Next::At(At::ForgetMode { start })
            }),
            _ => {}
        }
    }

    /// `rest::rest_held`.
    fn rest(&mut self, device: usize, at: At) {
        let recorded = self.before.ledger.compute_modes[device];
        let ends = |start: Option<bool>| Next::Ends(start.unwrap_or(true));
        match at {
            At::LeaveMode { start } => self.then(device, "mps rest", Call::LeaveMode(device), |done| {
                if done && recorded { Next::At(At::RestMode { start }) } else { ends(start) }
            }),
            At::RestMode { start } => self.act(device, "mps rest: restores the mode", |gpu| {
                gpu.exclusive = false;
                Next::At(At::RestForgetMode { start })
            }),
            At::RestForgetMode { start } => {
                self.then(device, "mps rest: forgets the mode", Call::ForgetMode(device), |_| ends(start));
            }
            _ => {}
        }
    }

    fn serves_still(&mut self, device: usize) {
        let left = self.before.ledger.daemons[device].is_some_and(|daemon| daemon.mode_left);
        let serves = self.before.serves(device) && !left;
        let model = self.model;
        let trusts = model.mutation == Some(Mutation::AdjustAnyRecord);
        self.step(Actor::Holder(device), "make_ready: does it serve still?", |state| {
            if serves || trusts {
                state.go_on(model, device, Next::At(At::AdjustBegin));
                return;
            }
            let Some(who) = state.locks[device].take().and_then(|holder| holder.by) else { return };
            *state.pc(who) = Pc::Wants { device, errand: Errand::Start, after: After::MakeReady };
        });
    }

    fn adjust_begin(&mut self, device: usize) {
        let limits = self.before.ledger.wanted(device, &self.model.shares);
        // A lease freed by this very call counts no more, so the limits are of the ledger after it.
        let (who, model) = (Actor::Holder(device), self.model);
        self.call(who, "adjust begins", Call::AdjustBegin(device), |state, answer| {
            let limits = state.ledger.wanted(device, &model.shares).or(limits);
            let next = match limits {
                Some(limits) if answer.done => Next::At(At::Control { limits }),
                _ => Next::Ends(true),
            };
            state.go_on(model, device, next);
        });
    }

    /// One change of the ledger by who holds the lock.
    fn then(&mut self, device: usize, what: &'static str, call: Call, next: impl FnOnce(bool) -> Next) {
        let model = self.model;
        self.call(Actor::Holder(device), what, call, |state, answer| {
            state.go_on(model, device, next(answer.done));
        });
    }

    /// One step outside the ledger by who holds the lock.
    fn act(&mut self, device: usize, what: &'static str, next: impl FnOnce(&mut Gpu) -> Next) {
        let model = self.model;
        self.step(Actor::Holder(device), what, |state| {
            let next = next(&mut state.gpus[device]);
            state.go_on(model, device, next);
        });
    }
}

/// How it goes on with an errand.
#[derive(Clone, Copy)]
enum Next {
    At(At),
    /// It ends, well or not.
    Ends(bool),
}

impl State {
    fn go_on(&mut self, model: &Daemons, device: usize, next: Next) {
        let Some(holder) = &mut self.locks[device] else { return };
        match next {
            Next::At(at) => holder.at = at,
            Next::Ends(well) => self.unlock(model, device, well),
        }
    }

    /// The daemon's lock is free again, and who waited for the errand goes on.
    pub(super) fn unlock(&mut self, model: &Daemons, device: usize, well: bool) {
        let Some(who) = self.locks[device].take().and_then(|holder| holder.by) else { return };
        if let Pc::Waits { device, after } = *self.pc(who) {
            self.resume(model, who, device, after, well);
        }
    }

    /// Whether a daemon's record says that it is or will be there.
    pub(super) fn is_up(&self, device: usize) -> bool {
        self.ledger.daemons[device]
            .is_some_and(|daemon| daemon.state == DaemonState::Serving && daemon.process)
    }
}
