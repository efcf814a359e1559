//! Slurm: what a job got on one node, in the words of `scontrol --details show job`, as a share; and this node's lines for
//! gres.conf, slurm.conf and cgroup.conf. Pure.
//!
//! The words were taken from Slurm 22.05.8 and 24.11.5. Slurm tells the prolog which GPU a job got, but neither how many
//! shards of it nor whether the GPU is the job's own: `gpu:1` and `shard:2` look the same there.

use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::place::SERVER_BYTES;
use sublet_core::share::{MIB, Mode, Percent};
use sublet_core::slurm::JobShare;

/// The GPUs, or parts of them, that a job got on a node. Counted as Slurm does: in the order of gres.conf, from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// None of them.
    Nothing,
    /// Whole GPUs.
    Gpus(Vec<u32>),
    /// A part of one GPU, in percent.
    Mps { gpu: u32, percent: u32 },
    /// Shards of one GPU, and of how many, if Slurm says so (24.11 does).
    Shards { gpu: u32, shards: u32, of: Option<u32> },
}

/// What the job in `shown`, the output of `scontrol --details show job`, got on the node that is one of `hosts` in each
/// of its groups of nodes. `is_here` says whether a host list, such as `n[1-2]`, names this node.
///
/// # Errors
/// It is not such an output, or what the job got cannot be a share.
pub fn allocation(shown: &str, is_here: impl Fn(&str) -> bool) -> Result<Allocation, String> {
    let mut words = shown.split_whitespace();
    while let Some(word) = words.next() {
        let Some(hosts) = word.strip_prefix("Nodes=").filter(|hosts| is_here(hosts)) else { continue };
        // `Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)`
        let gres = words.by_ref().take(3).find_map(|word| word.strip_prefix("GRES="));
        return of_gres(gres.ok_or_else(|| format!("Slurm does not say what the job got on {hosts}"))?);
    }
    Err("Slurm does not name this node among the job's".to_owned())
}

/// `gpu:h200:2(IDX:0-1)`, `shard:7(7/8,0/8)`, `mps:30(IDX:0)`; several are joined by commas outside the parentheses.
fn of_gres(text: &str) -> Result<Allocation, String> {
    let mut depth = 0_i32;
    let entries = text.split(move |letter| {
        depth += i32::from(letter == '(') - i32::from(letter == ')');
        letter == ',' && depth == 0
    });
    let mut found = Allocation::Nothing;
    for entry in entries.filter(|entry| !entry.is_empty()) {
        let next = of_entry(entry)?;
        match (&found, &next) {
            (_, Allocation::Nothing) => {}
            (Allocation::Nothing, _) => found = next,
            _ => return Err(format!("the job got {text}, which is more than one kind of share")),
        }
    }
    Ok(found)
}

fn of_entry(entry: &str) -> Result<Allocation, String> {
    let strange = || format!("the job got {entry}, which this sublet cannot read");
    let (name, place) = entry.split_once('(').ok_or_else(strange)?;
    let place = place.strip_suffix(')').ok_or_else(strange)?;
    let kind = name.split(':').next().unwrap_or_default();
    if !matches!(kind, "gpu" | "mps" | "shard") {
        return Ok(Allocation::Nothing);
    }
    let all: u32 = name.rsplit(':').next().and_then(|count| count.parse().ok()).ok_or_else(strange)?;
    let shares = shares(place, all).ok_or_else(strange)?;
    if kind == "gpu" {
        return Ok(Allocation::Gpus(shares.into_iter().map(|(gpu, ..)| gpu).collect()));
    }
    let [(gpu, part, of)] = shares[..] else {
        return Err(format!(
            "the job got {entry}: a share of sublet's is of one GPU; ask for less, or for whole GPUs"
        ));
    };
    match (kind, of) {
        ("mps", None | Some(100)) if (1..=100).contains(&part) => Ok(Allocation::Mps { gpu, percent: part }),
        ("mps", _) => Err(format!("the job got {entry}: gres.conf must have 100 of mps for each GPU")),
        _ => Ok(Allocation::Shards { gpu, shards: part, of }),
    }
}

/// A GPU, how many parts of it, and of how many, if that is given.
type Share = (u32, u32, Option<u32>);

/// `IDX:0-1,3`, or `7/8,0/8` with a part for each GPU. `all` is the sum. Without parts it is that of a single GPU.
fn shares(place: &str, all: u32) -> Option<Vec<Share>> {
    if let Some(list) = place.strip_prefix("IDX:") {
        return Some(gpus_of(list)?.into_iter().map(|gpu| (gpu, all, None)).collect());
    }
    let parts = (0..).zip(place.split(',')).map(|(gpu, part)| {
        let (part, of) = part.split_once('/')?;
        Some((gpu, part.parse().ok()?, Some(of.parse().ok()?)))
    });
    let mut parts: Vec<Share> = parts.collect::<Option<_>>()?;
    parts.retain(|(_, part, _)| *part > 0);
    (parts.iter().map(|(_, part, _)| part).sum::<u32>() == all).then_some(parts)
}

/// `0-1,3`
fn gpus_of(text: &str) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        // No host has more, and a range of billions would take all memory.
        if last > 1024 {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

// The allocation of a job, as a share.

/// The GPUs as gres.conf lists them ([`gres`]): in the order of their nodes.
///
/// # Errors
/// A GPU is in MIG mode: Slurm counts its instances.
pub fn in_order(inventory: &Inventory) -> Result<Vec<&Device>, String> {
    let mut gpus: Vec<&Device> = inventory.gpus().collect();
    gpus.sort_by_key(|gpu| gpu.minor);
    match gpus.iter().find(|gpu| gpu.mig_enabled) {
        Some(gpu) => Err(format!(
            "{} is in MIG mode, and sublet does not know how Slurm counts its instances: take it out of Slurm's GPUs \
             or out of MIG mode",
            gpu.number()
        )),
        None => Ok(gpus),
    }
}

/// The share for what a job got: with `mps:25` a quarter of the SMs and of the memory, with 2 of 8 shards a quarter of the
/// memory, with `gpu` the GPUs alone.
///
/// # Errors
/// This node has other GPUs than Slurm believes.
pub fn job_share(
    allocation: &Allocation,
    inventory: &Inventory,
    config: &Config,
) -> Result<Option<JobShare>, String> {
    let gpus = in_order(inventory)?;
    let gpu = |index: u32| {
        gpus.get(index as usize).copied().ok_or_else(|| {
            format!(
                "Slurm gave it GPU {index}, and this node has {}: gres.conf must list them as `sublet slurm gres` does",
                gpus.len()
            )
        })
    };
    let part = |index: u32, part: u64, of: u64, sm: Option<Percent>| {
        let gpu = gpu(index)?;
        // The bookable memory, less the MPS server's own.
        let all = gpu.memory_bytes.saturating_sub(config.limits.reserve).saturating_sub(SERVER_BYTES);
        let bytes = all / of * part / MIB * MIB;
        Ok(Some(JobShare { devices: vec![gpu.uuid.clone()], mode: Mode::Mps, sm, memory_bytes: Some(bytes) }))
    };
    match allocation {
        Allocation::Nothing => Ok(None),
        Allocation::Gpus(indices) => {
            let devices = indices.iter().map(|index| gpu(*index).map(|gpu| gpu.uuid.clone()));
            let devices = devices.collect::<Result<Vec<_>, String>>()?;
            Ok(Some(JobShare { devices, mode: Mode::Exclusive, sm: None, memory_bytes: None }))
        }
        Allocation::Mps { gpu, percent } => {
            part(*gpu, u64::from(*percent), 100, Some(Percent::from_thousandths(percent * 1000)))
        }
        Allocation::Shards { gpu, shards, of } => {
            let of = of.unwrap_or(config.slurm.shards);
            if *shards > of {
                return Err(format!(
                    "Slurm gave it {shards} shards of one GPU, and a GPU has {of} ([slurm] shards): gres.conf must say \
                     the same"
                ));
            }
            part(*gpu, u64::from(*shards), u64::from(of.max(1)), None)
        }
    }
}

// This node's lines for Slurm's files.

/// The unit of a GPU's parts. Slurm (24.11) gives a job with `mps` no GPU if the node has shards too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Unit {
    /// Shards: [slurm] shards for each GPU; jobs may share every GPU of the node.
    Shard,
    /// Percent, as mps: jobs share one GPU of the node at a time.
    Mps,
}

/// The lines of gres.conf, slurm.conf and cgroup.conf for node `name`.
///
/// # Errors
/// The node has no GPU, or one in MIG mode.
pub fn gres(name: &str, unit: Unit, inventory: &Inventory, config: &Config) -> Result<String, String> {
    let gpus = in_order(inventory)?;
    if gpus.is_empty() {
        return Err("this node has no GPU".to_owned());
    }
    let (word, each) = match unit {
        Unit::Shard => ("shard", config.slurm.shards),
        Unit::Mps => ("mps", 100),
    };
    let lines = |what: &str| -> String {
        let line = |gpu: &&Device| format!("NodeName={name} Name={what} File=/dev/nvidia{}\n", gpu.minor);
        gpus.iter().map(line).collect()
    };
    let (many, parts) = (gpus.len(), each as usize * gpus.len());
    let (whole, part) = (lines("gpu"), lines(&format!("{word} Count={each}")));
    Ok(format!(
        "# gres.conf\n{whole}{part}\n\
         # slurm.conf\n\
         GresTypes=gpu,{word}\n\
         NodeName={name} Gres=gpu:{many},{word}:{parts} # and what this line has already\n\
         SelectType=select/cons_tres\n\
         ProctrackType=proctrack/cgroup\n\
         TaskPlugin=task/cgroup # and what this line has already\n\
         PrologFlags=Alloc,Contain\n\
         Prolog=/usr/libexec/sublet/slurm/prolog\n\
         TaskProlog=/usr/libexec/sublet/slurm/task-prolog\n\
         Epilog=/usr/libexec/sublet/slurm/epilog\n\n\
         # cgroup.conf\nConstrainDevices=yes"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::place::fixture::{GIB, device, host};

    fn got(gres: &str) -> Result<Allocation, String> {
        of_gres(gres)
    }

    #[test]
    fn allocations_of_slurm_2205_and_2411_are_read() {
        assert_eq!(got("gpu:2(IDX:0-1)"), Ok(Allocation::Gpus(vec![0, 1])));
        assert_eq!(got("gpu:h200:3(IDX:0,2-3)"), Ok(Allocation::Gpus(vec![0, 2, 3])));
        assert_eq!(got("mps:25(IDX:0)"), Ok(Allocation::Mps { gpu: 0, percent: 25 }));
        assert_eq!(got("mps:30(0/100,30/100)"), Ok(Allocation::Mps { gpu: 1, percent: 30 }));
        assert_eq!(got("shard:2(IDX:3)"), Ok(Allocation::Shards { gpu: 3, shards: 2, of: None }));
        let shards = Allocation::Shards { gpu: 1, shards: 2, of: Some(8) };
        assert_eq!(got("shard:2(0/8,2/8,0/8,0/8)"), Ok(shards.clone()));
        assert_eq!(got("nic:1(IDX:0),shard:h200:2(0/8,2/8)"), Ok(shards));
        assert_eq!(got(""), Ok(Allocation::Nothing));
    }

    #[test]
    fn an_allocation_that_is_no_share_is_refused_and_never_guessed() {
        for (gres, why) in [
            ("mps(CNT:25)", "cannot read"),
            ("mps:150(IDX:0)", "100 of mps"),
            ("mps:30(30/400,0/400)", "100 of mps"),
            ("shard:9(8/8,1/8)", "of one GPU"),
            ("shard:9(IDX:0-1)", "of one GPU"),
            ("shard:9(8/8,2/8)", "cannot read"),
            ("gpu:1(IDX:0),shard:2(IDX:1)", "more than one kind"),
            ("gpu:1(IDX:0-4000000000)", "cannot read"),
            ("gpu:1(IDX:)", "cannot read"),
            ("gpu:1", "cannot read"),
            ("shard:1(IDX:0", "cannot read"),
        ] {
            let said = got(gres).expect_err(gres);
            assert!(said.contains(why), "{gres}: {said}");
        }
    }

    #[test]
    fn the_group_of_this_node_counts() {
        let shown = "JobId=6 UserId=tester(1000) NumNodes=2 AllocTRES=cpu=2,node=2 JOB_GRES=gpu:3\n  \
                     Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)\n  Nodes=n[2-3] CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)\n";
        assert_eq!(allocation(shown, |hosts| hosts == "n1"), Ok(Allocation::Gpus(vec![0, 1])));
        assert_eq!(allocation(shown, |hosts| hosts == "n[2-3]"), Ok(Allocation::Gpus(vec![0])));
        assert!(allocation(shown, |_| false).is_err());
        assert_eq!(
            allocation("Nodes=n1 CPU_IDs=0 Mem=0 GRES= TresPerNode=x", |_| true),
            Ok(Allocation::Nothing)
        );
        assert!(allocation("Nodes=n1 CPU_IDs=0", |_| true).is_err());
    }

    #[test]
    fn a_part_of_a_gpu_is_the_same_part_of_its_bookable_resources() {
        let (inventory, config) = (host(vec![device(1), device(0)]), Config::default());
        let all = 100 * GIB - (512 << 20) - SERVER_BYTES;
        let share = |allocation| job_share(&allocation, &inventory, &config);
        let quarter = share(Allocation::Mps { gpu: 1, percent: 25 }).unwrap().unwrap();
        assert_eq!((quarter.devices, quarter.mode), (vec!["GPU-1".to_owned()], Mode::Mps));
        assert_eq!(quarter.sm, Some(Percent::from_thousandths(25_000)));
        assert!(
            quarter.memory_bytes.unwrap() <= all / 4 && quarter.memory_bytes.unwrap() > all / 4 - 2 * MIB
        );
        let shards = |shards, of| share(Allocation::Shards { gpu: 0, shards, of });
        let two = shards(2, None).unwrap().unwrap();
        assert_eq!((two.sm, two.devices), (None, vec!["GPU-0".to_owned()]));
        assert!(two.memory_bytes.unwrap() * 4 <= all);
        assert!(shards(2, Some(4)).unwrap().unwrap().memory_bytes.unwrap() * 2 <= all);
        assert!(shards(9, None).unwrap_err().contains("[slurm] shards"));
        let whole = share(Allocation::Gpus(vec![0, 1])).unwrap().unwrap();
        assert_eq!((whole.devices.len(), whole.mode, whole.memory_bytes), (2, Mode::Exclusive, None));
        assert_eq!(share(Allocation::Nothing), Ok(None));
        assert!(share(Allocation::Gpus(vec![2])).unwrap_err().contains("this node has 2"));
    }

    #[test]
    fn every_gpu_has_its_lines_in_the_order_of_the_nodes() {
        let inventory = host(vec![device(1), device(0)]);
        let text = gres("n1", Unit::Shard, &inventory, &Config::default()).unwrap();
        assert!(text.starts_with(
            "# gres.conf\nNodeName=n1 Name=gpu File=/dev/nvidia0\nNodeName=n1 Name=gpu File=/dev/nvidia1\n\
             NodeName=n1 Name=shard Count=8 File=/dev/nvidia0\nNodeName=n1 Name=shard Count=8 File=/dev/nvidia1\n\n\
             # slurm.conf\nGresTypes=gpu,shard\nNodeName=n1 Gres=gpu:2,shard:16 "
        ), "{text}");
        let text = gres("n1", Unit::Mps, &inventory, &Config::default()).unwrap();
        assert!(
            text.contains("Name=mps Count=100 File=/dev/nvidia1") && text.contains("gpu:2,mps:200"),
            "{text}"
        );
        assert!(
            text.contains("\nTaskPlugin=task/cgroup ")
                && text.ends_with("\n\n# cgroup.conf\nConstrainDevices=yes"),
            "{text}"
        );
        let none = host(vec![]);
        assert!(gres("n1", Unit::Mps, &none, &Config::default()).is_err());
    }
}
