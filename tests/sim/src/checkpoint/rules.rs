//! What the simulated driver answers to `cuCheckpointProcess…`, and what becomes of the process.
//!
//! "Measured" is: on one, two and four H100 and H200, driver 580.159.04, CUDA 13.0. "Chosen" is what was not measured.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Ask, Call, Reply, Suspension};
use crate::layout::contexts::{self, Kind};
use crate::layout::topology::{Gpu, Topology};
use crate::layout::{Root, trailer};
use crate::mps::device::{self, Device};
use crate::mps::exclusive::{Claim, claim};
use crate::mps::nodes;
use crate::mps::program::Held;
use crate::nvml::Answer;

/// The first driver whose libcuda has the functions, which came with CUDA 12.8 (cuda-checkpoint's README).
pub const FIRST_DRIVER: u32 = 570;
/// The first driver that takes pairs of GPUs: `gpuPairs` came with CUDA 13.
const FIRST_WITH_PAIRS: u32 = 580;

/// `CUresult` of cuda.h.
pub(super) const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
pub(super) const NOT_INITIALIZED: u32 = 3;
const DEVICE_UNAVAILABLE: u32 = 46;
pub(super) const OPERATING_SYSTEM: u32 = 304;
const ILLEGAL_STATE: u32 = 401;
const NOT_SUPPORTED: u32 = 801;
pub(super) const UNKNOWN: u32 = 999;

/// Milliseconds that a checkpoint takes, and those for each GiB, the context's half included. Measured: 0.4 s for a small
/// context, 4.7 s for 10 GiB beside it, 9.6 s for 20, 17 s for 40.
const CHECKPOINT: (u64, u64) = (184, 430);
/// Those of a restore. Measured: 0.35 s for a small context, 2.0 s for 10 GiB, 4.4 s for 20, 6.6 s for 40.
const RESTORE: (u64, u64) = (265, 170);
/// Those of locking and unlocking. Measured: 1 ms each.
const LOCK: (u64, u64) = (1, 0);

/// Of what is copied to host memory this much is real memory of the process, in MiB, and the rest is a figure. Measured:
/// the memory of the process (RSS) grows by what it had on the GPU.
const REAL_MIB: u64 = 128;

/// `CUprocessState` of cuda.h. Measured: the first three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u32)]
pub enum State {
    /// It computes.
    #[default]
    Running = 0,
    /// Its next CUDA call waits.
    Locked = 1,
    /// Its memory is in the host's.
    Checkpointed = 2,
    /// For a call that a test lets fail for good.
    Failed = 3,
}

impl Held {
    /// Answers a call for this process.
    pub(crate) fn answer(&mut self, ask: &Ask) -> Reply {
        let answer = match &ask.call {
            Call::GetState => Ok(()),
            Call::Lock => self.lock(ask),
            Call::Checkpoint => self.checkpoint(ask),
            Call::Restore(pairs) => self.restore(pairs, ask),
            Call::Unlock => self.unlock(ask),
            Call::Fail => {
                self.suspension.state = State::Failed;
                Ok(())
            }
        };
        // Measured, with 10 GiB in a cgroup whose memory.max was 6: this error, and the OOM killer came.
        let killed = ask.call == Call::Checkpoint && answer == Err(OPERATING_SYSTEM);
        Reply { answer, state: self.suspension.state, killed }
    }

    fn lock(&mut self, ask: &Ask) -> Answer {
        self.must_be(State::Running)?;
        // Measured: under MPS this error, and the process goes on unharmed. Chosen: so on a MIG device.
        if self.mps || self.first.device.on.instance.is_some() {
            return Err(NOT_SUPPORTED);
        }
        take_time(LOCK, 0, ask);
        self.suspension.state = State::Locked;
        Ok(())
    }

    fn checkpoint(&mut self, ask: &Ask) -> Answer {
        self.must_be(State::Locked)?;
        // Measured: this error, the process stays locked, and unlocked it goes on unharmed.
        if self.suspension.managed {
            return Err(NOT_SUPPORTED);
        }
        // Measured: the driver in the process opens every GPU that it knew. After a move, without the node of the old GPU,
        // this error, and the process stays locked. It does not make that node.
        self.suspension.known.extend(self.minors());
        if !reaches(&self.suspension.known) {
            return Err(OUT_OF_MEMORY);
        }
        let topology = trailer::read(&self.libcuda).ok_or(UNKNOWN)?;
        self.suspension.opened = opened(&topology);
        let mib = self.used_mib();
        if ask.host_mib.is_some_and(|left| left < mib) {
            return Err(OPERATING_SYSTEM);
        }
        take_time(CHECKPOINT, mib, ask);
        self.leave_gpus(mib);
        self.suspension.state = State::Checkpointed;
        Ok(())
    }

    fn restore(&mut self, pairs: &[(String, String)], ask: &Ask) -> Answer {
        self.must_be(State::Checkpointed)?;
        if let Some(error) = self.suspension.lost {
            return Err(error);
        }
        let topology = trailer::read(&self.libcuda).ok_or(UNKNOWN)?;
        let to = self.destinations(pairs, &topology)?;
        // Measured: a process on two GPUs with copies between them checkpoints, and cannot be restored: it is lost. Of two
        // processes with common memory by CUDA IPC both checkpoint, and the second cannot be restored, in either order of
        // the steps. Chosen: that a second try answers the same, and this error for IPC.
        if self.suspension.peers && self.contexts().count() > 1 || self.suspension.is_restored_elsewhere() {
            return self.lose(INVALID_VALUE, INVALID_VALUE);
        }
        // Measured: without room on the GPU this error, and then OPERATING_SYSTEM for good, with room too, and the process
        // hangs in its CUDA call. Chosen: that it stays checkpointed.
        let lacks = |(made, device): (u64, &Device)| ask.free_mib(device) < made;
        if self.contexts().map(|made| made.used_mib).zip(&to).any(lacks) {
            return self.lose(OUT_OF_MEMORY, OPERATING_SYSTEM);
        }
        // Chosen: a compute mode that lets no context be made, as of a GPU that is EXCLUSIVE_PROCESS and in use, ends the
        // process like a GPU without room.
        let Some(claims) = self.claims(&to) else {
            return self.lose(DEVICE_UNAVAILABLE, OPERATING_SYSTEM);
        };
        self.suspension.tell_restored();
        take_time(RESTORE, self.used_mib(), ask);
        self.suspension.known.extend(to.iter().map(|device| device.on.minor));
        self.return_to(to, claims, ask);
        self.suspension.state = State::Locked;
        Ok(())
    }

    fn unlock(&mut self, ask: &Ask) -> Answer {
        self.must_be(State::Locked)?;
        take_time(LOCK, 0, ask);
        self.suspension.state = State::Running;
        Ok(())
    }

    /// Chosen: a call in another state than its own changes nothing.
    fn must_be(&self, state: State) -> Answer {
        if self.suspension.state == state { Ok(()) } else { Err(ILLEGAL_STATE) }
    }

    /// The process can never be restored. `then` is what further calls answer.
    fn lose(&mut self, now: u32, then: u32) -> Answer {
        self.suspension.lost = Some(then);
        Err(now)
    }

    /// The device to which each context returns. Measured: pairs have each GPU that the process could open when it was suspended, and
    /// a GPU that it can open now in its place; with more or fewer, or without the new one's node or device cgroup rule, it is an
    /// error, the process stays checkpointed, and a second try with these works; both sides were of one model. Without pairs the
    /// place of its GPU among those that it could open then, among those that it can open now: another GPU, where these differ, or,
    /// where there are too few, an error that does no harm. Chosen: that another model is an error like other pairs.
    fn destinations(&self, pairs: &[(String, String)], topology: &Topology) -> Result<Vec<Device>, u32> {
        let (then, now) = (&self.suspension.opened, opened(topology));
        if !pairs.is_empty()
            && (topology.driver_branch() < FIRST_WITH_PAIRS || !is_permitted(pairs, then, &now, topology))
        {
            return Err(INVALID_VALUE);
        }
        let all = device::all(topology);
        let to = |old: &Device| {
            let new = match pairs.iter().find(|(uuid, _)| *uuid == old.uuid) {
                Some((_, new)) => Some(new),
                None => now.get(then.iter().position(|uuid| *uuid == old.uuid)?),
            };
            all.iter().find(|device| Some(&device.uuid) == new).cloned()
        };
        self.contexts().map(|made| to(&made.device).ok_or(NOT_SUPPORTED)).collect()
    }

    fn claims(&self, to: &[Device]) -> Option<Vec<Claim>> {
        let root = Root::of_library(&self.libcuda).ok().flatten();
        to.iter().map(|device| claim(device, root.as_ref(), &self.libcuda)).collect()
    }

    fn minors(&self) -> BTreeSet<u32> {
        self.contexts().map(|made| made.device.on.minor).collect()
    }

    fn used_mib(&self) -> u64 {
        self.contexts().map(|made| made.used_mib).sum()
    }

    /// Measured: the GPU's used memory falls to 0, the process is not in its list, and others use the memory.
    fn leave_gpus(&mut self, mib: u64) {
        self.suspension.copy_to_host(mib);
        for made in self.contexts_mut() {
            (made.shown, made.claim) = (None, None);
        }
    }

    fn return_to(&mut self, to: Vec<Device>, claims: Vec<Claim>, ask: &Ask) {
        let tag = self.tag.clone();
        for ((made, device), claim) in self.contexts_mut().zip(to).zip(claims) {
            made.free_mib = ask.free_mib(&device).saturating_sub(made.used_mib);
            made.shown = contexts::announce(&tag, device.on, Kind::Compute, made.used_mib).ok();
            (made.device, made.claim) = (device, Some(claim));
        }
        self.suspension.copy_back();
    }
}

impl Suspension {
    /// What is on the GPU is lost there, and is in host memory at the beginning of the copy.
    fn copy_to_host(&mut self, mib: u64) {
        let content = std::mem::take(&mut self.content);
        let length = usize::try_from(mib.min(REAL_MIB) << 20).unwrap_or(0).max(content.len());
        // Not zeroes, which the kernel would not give memory for.
        self.host = vec![1; length];
        self.host[..content.len()].copy_from_slice(&content);
        self.copied = content.len();
    }

    fn copy_back(&mut self) {
        let host = std::mem::take(&mut self.host);
        self.content = host[..self.copied].to_vec();
    }

    /// Whether another process with the same memory was restored.
    fn is_restored_elsewhere(&self) -> bool {
        let Some(shared) = &self.shared else { return false };
        let own = std::process::id().to_string();
        fs::read_to_string(shared).unwrap_or_default().lines().any(|restored| restored != own)
    }

    /// Tells the processes with the same memory that this one is restored.
    fn tell_restored(&self) {
        let append = |file: &Path| File::options().append(true).open(file);
        if let Some(Ok(mut file)) = self.shared.as_deref().map(append) {
            let _ = writeln!(file, "{}", std::process::id());
        }
    }
}

impl Ask {
    /// MiB that a GPU has for a process whose memory is in the host's.
    fn free_mib(&self, device: &Device) -> u64 {
        device.total_mib.saturating_sub(self.used_mib.get(&device.on.minor).copied().unwrap_or(0))
    }
}

fn take_time((fixed, each_gib): (u64, u64), mib: u64, ask: &Ask) {
    sleep(Duration::from_millis((fixed + each_gib * mib / 1024) * ask.pace / 100));
}

fn node(minor: u32) -> String {
    format!("nvidia{minor}")
}

/// Whether the process may open the nodes of all these GPUs.
fn reaches(minors: &BTreeSet<u32>) -> bool {
    minors.iter().all(|minor| nodes::opens(&node(*minor)))
}

/// The UUIDs of GPUs whose nodes the process may open. Measured: the driver makes the nodes of all of the host's GPUs itself where the
/// process may (root with `CAP_MKNOD`), of which the device cgroup keeps others than the container's closed.
fn opened(topology: &Topology) -> Vec<String> {
    let opens = |gpu: &&Gpu| {
        nodes::make(&node(gpu.minor), topology.majors.nvidia, gpu.minor);
        nodes::opens(&node(gpu.minor))
    };
    topology.gpu.iter().filter(opens).map(|gpu| gpu.uuid.clone()).collect()
}

fn is_permitted(pairs: &[(String, String)], then: &[String], now: &[String], topology: &Topology) -> bool {
    let name = |uuid: &str| topology.gpu.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| &gpu.name);
    let (old, new): (BTreeSet<&String>, BTreeSet<&String>) =
        pairs.iter().map(|(old, new)| (old, new)).unzip();
    let is_exact = old == then.iter().collect() && new.is_subset(&now.iter().collect());
    is_exact
        && [old.len(), new.len()] == [pairs.len(); 2]
        && pairs.iter().all(|(old, new)| name(old) == name(new))
}
