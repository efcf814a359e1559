//! A driver in memory for tests. It obeys the placement rules, reuses ids but no UUIDs, and fails on demand.

use super::{Answer, Compute, ComputeProfile, Driver, Gpu, Instance, Mode, Profile, Span};

/// H200 (`nvidia-smi mig -lgip -lgipp`): name, id, instances, memory, SMs, slices, starts, size.
type Row = (&'static str, u32, u32, u64, u32, u32, &'static [u32], u32);
const H200: &[Row] = &[
    ("7g.141gb", 0, 1, 143_360, 132, 7, &[0], 8),
    ("4g.71gb", 5, 1, 71_424, 64, 4, &[0], 4),
    ("3g.71gb", 9, 2, 71_424, 60, 3, &[0, 4], 4),
    ("2g.35gb", 14, 3, 33_280, 32, 2, &[0, 2, 4], 2),
    ("1g.35gb", 15, 4, 33_280, 26, 1, &[0, 2, 4, 6], 2),
    ("1g.18gb", 19, 7, 16_384, 16, 1, &[0, 1, 2, 3, 4, 5, 6], 1),
    ("1g.18gb+me", 20, 1, 16_384, 16, 1, &[0, 1, 2, 3, 4, 5, 6], 1),
];

pub(super) fn profile(name: &str) -> u32 {
    H200.iter().find(|row| row.0 == name).map(|row| row.1).unwrap()
}

/// An H200 in MIG mode without instances.
pub(super) fn h200() -> Gpu {
    let profile = |&(name, id, instances, memory_mib, sms, slices, starts, size): &Row| Profile {
        id,
        name: name.into(),
        slices,
        sms,
        memory_mib,
        instances,
        media: [slices, u32::from(id == 0 || id == 20)],
        free: instances,
        placements: starts.iter().map(|&start| Span { start, size }).collect(),
    };
    Gpu {
        uuid: "GPU-0".into(),
        index: 0,
        name: "NVIDIA H200".into(),
        pci_device: 0x2335_10de,
        mode: Some(Mode { current: true, pending: true }),
        resets: false,
        profiles: H200.iter().map(profile).collect(),
        instances: Vec::new(),
        running: Vec::new(),
        held: Vec::new(),
    }
}

/// Start, size and profile of an instance, and start and slices of each of its parts.
pub(super) type Shape = (u32, u32, u32, Vec<(u32, u32)>);

/// The same after instances are created again: placements, profiles and compute instances, without ids and
/// UUIDs.
pub(super) fn shape(gpu: &Gpu) -> Vec<Shape> {
    let cut = |one: &Instance| {
        let mut cut: Vec<_> = one.compute.iter().map(|part| (part.span.start, part.slices)).collect();
        cut.sort_unstable();
        cut
    };
    let mut shape: Vec<_> =
        gpu.instances.iter().map(|one| (one.span.start, one.span.size, one.profile, cut(one))).collect();
    shape.sort_unstable();
    shape
}

/// A driver of one or several GPUs.
pub(super) struct Double {
    pub gpus: Vec<Gpu>,
    /// The number of calls so far.
    pub calls: usize,
    /// Calls that fail, by number.
    pub fails: Box<dyn Fn(usize) -> bool>,
    /// Whether failing calls still do their work.
    pub all_the_same: bool,
    /// The number of compute instances created so far, from which UUIDs are made.
    pub made: usize,
}

impl Double {
    pub fn new(gpus: Vec<Gpu>) -> Self {
        Self { gpus, calls: 0, fails: Box::new(|_| false), all_the_same: false, made: 0 }
    }

    /// One GPU with whole instances of these profiles at these starts.
    pub fn with(layout: &[(u32, u32)]) -> Self {
        let mut double = Self::new(vec![h200()]);
        for &(profile, start) in layout {
            let size = double.gpus[0].profile(profile).unwrap().placements[0].size;
            let slices = double.gpus[0].profile(profile).unwrap().slices;
            let gi = double.create_instance("GPU-0", profile, Span { start, size }).unwrap();
            double.create_compute("GPU-0", gi, slices, None).unwrap();
        }
        double
    }

    fn call<T>(&mut self, name: &str, work: impl FnOnce(&mut Self) -> Answer<T>) -> Answer<T> {
        self.calls += 1;
        if !(self.fails)(self.calls - 1) {
            return work(self);
        }
        if self.all_the_same {
            work(self)?;
        }
        Err(error(name, "the test says so"))
    }

    fn find(&mut self, gpu: &str) -> &mut Gpu {
        self.gpus.iter_mut().find(|one| one.uuid == gpu).unwrap()
    }

    fn gi(&mut self, gpu: &str, gi: u32) -> Answer<&mut Instance> {
        let found = self.find(gpu).instances.iter_mut().find(|one| one.gi == gi);
        found.ok_or_else(|| error("looking", "not found"))
    }
}

fn error(call: &str, why: &str) -> anyhow::Error {
    anyhow::anyhow!("{call}: {why}")
}

fn lowest(taken: impl Fn(u32) -> bool, from: u32) -> u32 {
    (from..1000).find(|&id| !taken(id)).unwrap()
}

impl Driver for Double {
    fn gpu(&mut self, gpu: &str) -> Answer<Gpu> {
        self.call("gpu", |this| Ok(this.find(gpu).clone()))
    }

    fn instances(&mut self, gpu: &str) -> Answer<Vec<Instance>> {
        self.call("instances", |this| Ok(this.find(gpu).instances.clone()))
    }

    fn mode(&mut self, gpu: &str) -> Answer<Option<Mode>> {
        self.call("mode", |this| Ok(this.find(gpu).mode))
    }

    fn set_mode(&mut self, gpu: &str, on: bool) -> Answer<()> {
        self.call("set_mode", |this| {
            let gpu = this.find(gpu);
            if !gpu.instances.is_empty() {
                return Err(error("set_mode", "in use"));
            }
            let mode = gpu.mode.as_mut().unwrap();
            mode.pending = on;
            if !gpu.resets {
                mode.current = on;
            }
            Ok(())
        })
    }

    fn reset(&mut self, gpu: &str) -> Answer<()> {
        self.call("reset", |this| {
            let mode = this.find(gpu).mode.as_mut().unwrap();
            mode.current = mode.pending;
            Ok(())
        })
    }

    fn create_instance(&mut self, gpu: &str, profile: u32, span: Span) -> Answer<u32> {
        self.call("create_instance", |this| {
            let gpu = this.find(gpu);
            let rules = gpu.profile(profile).ok_or_else(|| error("create_instance", "no such profile"))?;
            let same = gpu.instances.iter().filter(|one| one.profile == profile).count();
            let free = !gpu.instances.iter().any(|one| one.span.overlaps(span));
            let on = gpu.mode.is_some_and(|mode| mode.current);
            if !on || !free || !rules.placements.contains(&span) || same >= rules.instances as usize {
                return Err(error("create_instance", "insufficient resources"));
            }
            let kinds = (1..=rules.slices)
                .map(|slices| ComputeProfile {
                    id: slices,
                    slices,
                    instances: rules.slices / slices,
                    placements: (0..=rules.slices - slices)
                        .map(|start| Span { start, size: slices })
                        .collect(),
                })
                .collect();
            let gi = lowest(|id| gpu.instances.iter().any(|one| one.gi == id), 1);
            gpu.instances.push(Instance { gi, profile, span, held: None, kinds, compute: Vec::new() });
            gpu.instances.sort_by_key(|one| one.span);
            Ok(gi)
        })
    }

    fn destroy_instance(&mut self, gpu: &str, gi: u32) -> Answer<()> {
        self.call("destroy_instance", |this| {
            let one = this.gi(gpu, gi)?;
            if !one.compute.is_empty() || one.held.is_some() {
                return Err(error("destroy_instance", "in use"));
            }
            this.find(gpu).instances.retain(|one| one.gi != gi);
            Ok(())
        })
    }

    fn create_compute(&mut self, gpu: &str, gi: u32, slices: u32, span: Option<Span>) -> Answer<()> {
        self.call("create_compute", |this| {
            let uuid = format!("MIG-{}", this.made);
            let one = this.gi(gpu, gi)?;
            let kind = one.kinds.iter().find(|kind| kind.slices == slices);
            let free = |span: &Span| !one.compute.iter().any(|part| part.span.overlaps(*span));
            let wanted = |at: &Span| span.is_none_or(|span| span == *at);
            let at = kind.and_then(|kind| kind.placements.iter().find(|at| wanted(at) && free(at)).copied());
            let span = at.ok_or_else(|| error("create_compute", "insufficient resources"))?;
            let ci = lowest(|id| one.compute.iter().any(|part| part.ci == id), 0);
            one.compute.push(Compute { ci, slices, span, uuid, held: None });
            this.made += 1;
            Ok(())
        })
    }

    fn destroy_compute(&mut self, gpu: &str, gi: u32, ci: u32) -> Answer<()> {
        self.call("destroy_compute", |this| {
            let one = this.gi(gpu, gi)?;
            let part = one.compute.iter().find(|part| part.ci == ci);
            if part.is_none_or(|part| part.held.is_some()) {
                return Err(error("destroy_compute", "in use, or not there"));
            }
            one.compute.retain(|part| part.ci != ci);
            Ok(())
        })
    }
}
