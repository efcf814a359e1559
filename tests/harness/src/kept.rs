//! What `cuda-probe keep` says in an engine's container while that is suspended, resumed and moved: whether it goes on with
//! what it had, and on which GPU.

use std::time::Duration;

use serde_json::{Value, json};

use crate::bundle::Finished;
use crate::world::{World, eventually};

/// For a shell in a container: prints the GPUs' nodes that it may open. The driver makes others where it may, which the device cgroup
/// keeps closed.
pub const OPEN_NODES: &str = "echo $(for n in /dev/nvidia[0-9]*; do case $( (exec 3<>$n) 2>&1 ) in *ermi*) ;; *) echo $n ;; esac; done)";

/// The program.
pub const KEEP: &[&str] = &["cuda-probe", "keep", "256", "600"];

/// Annotations of a container that may be suspended.
pub const ALLOW: &[&str] = &["sublet.gpu=0", "sublet.memory=24GiB", "sublet.suspend=allow"];

/// UUID of a GPU of the topology h200x8, whose device minors are not their indices: GPU 2 has nvidia3.
#[must_use]
pub fn gpu(index: u32) -> Value {
    json!(format!("GPU-5b1e7000-0000-4000-8000-0000000008{index:02}"))
}

/// A container whose program keeps something.
pub struct Kept<'a> {
    world: &'a World,
    /// Its log.
    log: Box<dyn Fn() -> Finished + 'a>,
}

impl<'a> Kept<'a> {
    /// One of this world, once it computes.
    #[must_use]
    pub fn of(world: &'a World, log: impl Fn() -> Finished + 'a) -> Self {
        let kept = Self { world, log: Box::new(log) };
        assert!(eventually(|| !kept.rounds().is_empty()), "it does not compute: {:?}", (kept.log)());
        kept
    }

    fn rounds(&self) -> Vec<Value> {
        let mut lines = (self.log)().json();
        lines.retain(|line| line["event"] == "round");
        lines
    }

    /// It computes, with what it had.
    pub fn goes_on(&self) {
        let before = self.rounds().len();
        assert!(eventually(|| self.rounds().len() > before), "it hangs: {:?}", (self.log)());
        assert!(self.rounds().iter().all(|round| round["equal"] == true), "{:?}", (self.log)());
    }

    /// It computes nothing, and has nothing on a GPU.
    pub fn is_suspended(&self) {
        let before = self.rounds().len();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!((self.rounds().len(), self.lease()["state"].clone()), (before, json!("suspended")));
    }

    /// It computes, with what it had, on this GPU of the topology h200x8 alone.
    pub fn computes_on(&self, index: u32) {
        self.goes_on();
        assert_eq!(
            self.rounds().last().expect("a round")["uuids"],
            json!([gpu(index)]),
            "{:?}",
            (self.log)()
        );
    }

    /// The same, and the ledger says so.
    pub fn is_on(&self, index: u32) {
        self.computes_on(index);
        let lease = self.lease();
        assert_eq!((&lease["device"], &lease["state"]), (&gpu(index), &json!("active")));
    }

    /// Its lease, the only one of its world.
    #[must_use]
    pub fn lease(&self) -> Value {
        let leases = self.world.leases();
        assert_eq!(leases.len(), 1, "{leases:?}");
        leases[0].clone()
    }

    /// Runs a sublet command, which must succeed.
    pub fn done(&self, arguments: &[&str]) {
        let done = Finished::of(&self.world.sublet(arguments));
        assert!(done.ok, "sublet {}: {}", arguments.join(" "), done.stderr);
    }

    /// Runs a sublet command that is refused: the word for it.
    #[must_use]
    pub fn refused(&self, arguments: &[&str]) -> String {
        let refused = Finished::of(&self.world.sublet(&[arguments, &["--format", "json"]].concat()));
        let error: Value = serde_json::from_str(&refused.stdout).expect("JSON");
        assert!(!refused.ok, "sublet {}: {refused:?}", arguments.join(" "));
        error["reason"].as_str().expect("a word").to_owned()
    }
}
