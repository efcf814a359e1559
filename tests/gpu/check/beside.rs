//! One row of the table that compares sublet with plain MPS.

use std::time::Duration;

use serde_json::{Value, json};

/// What became of an attack, as the host sees it.
#[derive(Clone, Copy)]
pub(super) enum Held {
    /// It had no effect.
    Always,
    EndedAfter(Duration),
    /// It went on for all the time that it was watched.
    No(Duration),
    NotTried,
}

/// One attack, what was to stop it, and the effect on the neighbour.
pub(super) struct Line {
    pub attack: String,
    pub by: &'static str,
    pub held: Held,
    /// The neighbour's `lat`, and the word with which it ended; none: it hangs.
    pub latency: Value,
    pub end: Option<String>,
    /// What its next program gets.
    pub next: Value,
    /// SMs of one share.
    pub sms: u64,
    /// For sublet: whether the neighbour is expected to notice. Nothing is expected of plain MPS.
    pub is_noticed: Option<bool>,
}

pub(super) const HEADING: &str = "| attack | by | held | the neighbour's error | its round, ms: median, worst | \
                                  its next program | |\n|---|---|---|---|---|---|---|";

impl Line {
    fn is_unharmed(&self) -> bool {
        self.end.as_deref() == Some("CUDA_SUCCESS")
    }

    /// None: nothing was expected. What was not tried tells nothing of plain MPS either.
    fn verdict(&self) -> Option<bool> {
        if matches!(self.held, Held::NotTried) {
            return Some(false);
        }
        let continues = self.next["mps"] == json!(true) && self.next["sm"] == json!(self.sms);
        let ends = !matches!(self.held, Held::No(_));
        self.is_noticed.map(|noticed| ends && self.is_unharmed() != noticed && continues)
    }

    pub fn is_ok(&self) -> bool {
        self.verdict() != Some(false)
    }

    pub fn text(&self) -> String {
        let verdict = match self.verdict() {
            Some(true) => "ok",
            Some(false) => "**FAILED**",
            None => "",
        };
        let latency = format!("{}, {}", ms(&self.latency["p50_ms"]), ms(&self.latency["max_ms"]));
        let error = match &self.end {
            Some(_) if self.is_unharmed() => "none",
            Some(error) => error,
            None => "it hangs",
        };
        let columns = [
            &self.attack,
            self.by,
            &self.held.text(self.is_unharmed()),
            error,
            &latency,
            &told(&self.next),
            verdict,
        ];
        format!("| {} |", columns.join(" | "))
    }
}

impl Held {
    fn text(self, unharmed: bool) -> String {
        match self {
            Self::Always if unharmed => "held".to_owned(),
            Self::Always => "not held: the neighbour's work ended".to_owned(),
            Self::EndedAfter(time) => format!("ended after {:.1} s", time.as_secs_f64()),
            Self::No(time) => format!("not held: still so after {} s", time.as_secs()),
            Self::NotTried => "**was not tried**".to_owned(),
        }
    }
}

fn ms(value: &Value) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}

fn told(info: &Value) -> String {
    match (info["error"].as_str(), info["mps"].as_bool()) {
        (Some(error), _) => error.to_owned(),
        (None, Some(true)) => format!("in MPS, {} SMs", info["sm"]),
        (None, Some(false)) => format!("outside MPS, {} SMs, {} MiB free", info["sm"], info["free_mib"]),
        (None, None) => "none in 10 s".to_owned(),
    }
}
