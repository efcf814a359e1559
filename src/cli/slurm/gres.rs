//! This node's lines for gres.conf, slurm.conf and cgroup.conf. Pure.

use super::job_share::in_order;
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};

/// What a GPU's parts are counted in. Slurm (24.11) gives a job with `mps` no GPU if the node has shards too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Unit {
    /// Shards: `[slurm] shards` for each GPU; jobs may share every GPU of the node.
    Shard,
    /// Percent, as `mps`: jobs share one GPU of the node at a time.
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
    use sublet_core::place::fixture::{device, host};

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
