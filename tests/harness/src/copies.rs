//! A ledger full of leases, for benches: copies of one real lease, each with a process of its own that lives.

use std::process::{Child, Command};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::mig::ledger;
use crate::world::World;

/// Copies of a lease. Their processes end with this.
pub struct Copies {
    /// With that lease alone, as sublet wrote it: with the namespaces and the lists of mount points that go with it.
    ledger: Value,
    /// One for each copy.
    sleepers: Vec<Child>,
}

impl Copies {
    /// Of the only lease in the ledger.
    #[must_use]
    pub fn of(world: &World) -> Self {
        Self { ledger: ledger(world), sleepers: Vec::new() }
    }

    /// Fills the ledger up to so many copies. `change` gets each with its number, and gives it its user and its device.
    ///
    /// # Errors
    /// A process cannot be started, the ledger cannot be written, or sublet frees one of them.
    pub fn fill(
        &mut self,
        world: &World,
        leases: usize,
        mut change: impl FnMut(usize, &mut Value),
    ) -> Result<()> {
        while self.sleepers.len() < leases {
            self.sleepers.push(Command::new("/bin/sleep").arg("86400").spawn()?);
        }
        let copy = |(number, sleeper): (usize, &Child)| {
            let mut lease = self.copy(number, sleeper.id())?;
            change(number, &mut lease);
            Ok(lease)
        };
        let copies = self.sleepers.iter().enumerate().map(copy).collect::<Result<_>>()?;
        let mut full = self.ledger.clone();
        full["leases"] = Value::Array(copies);
        std::fs::write(world.state_dir().join("ledger.json"), full.to_string())?;
        let gc = world.sublet(&["gc"]);
        ensure!(gc.status.success(), "gc: {gc:?}");
        let left = world.booked().len();
        ensure!(left == self.sleepers.len(), "of {} leases {left} are left", self.sleepers.len());
        Ok(())
    }

    fn copy(&self, number: usize, pid: u32) -> Result<Value> {
        let mut lease = self.ledger["leases"][0].clone();
        lease["id"] = json!(format!("{:016x}", number + 1));
        lease["container"]["id"] = json!(format!("{number:064x}"));
        // A runtime has the records of all its containers in one directory.
        for place in ["bundle", "rootfs", "record"] {
            lease["container"][place] = json!(format!("/run/copies/{place}/{number:064x}"));
        }
        let process = json!({"pid": pid, "start_time": start_time(pid)?});
        lease["owner"] = process.clone();
        lease["init"] = json!({"process": process, "pid_namespace": 0, "cgroup": null});
        Ok(lease)
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        for sleeper in &mut self.sleepers {
            let _ = sleeper.kill();
            let _ = sleeper.wait();
        }
    }
}

/// In clock ticks since boot, proc(5).
fn start_time(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let field = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(19)).context("stat")?;
    Ok(field.parse()?)
}
