//! What a job got, as a share. Pure.

use super::Allocation;
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::place::SERVER_BYTES;
use sublet_core::share::{MIB, Mode, Percent};
use sublet_core::slurm::JobShare;

/// The GPUs as gres.conf lists them ([`super::gres`]): in the order of their nodes.
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
        // What may be booked, less the MPS server's own.
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

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::place::fixture::{GIB, device, host};

    #[test]
    fn a_part_of_a_gpu_is_the_same_part_of_what_may_be_booked() {
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
}
