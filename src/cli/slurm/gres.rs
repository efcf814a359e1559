//! This node's lines for gres.conf, slurm.conf and cgroup.conf. Pure.

use super::job_share::in_order;
use sublet_core::config::Config;
use sublet_core::inventory::Inventory;

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
    let mut lines = vec!["# gres.conf".to_owned()];
    let minors = gpus.iter().map(|gpu| gpu.minor);
    lines.extend(minors.clone().map(|minor| format!("NodeName={name} Name=gpu File=/dev/nvidia{minor}")));
    lines.extend(
        minors.map(|minor| format!("NodeName={name} Name={word} Count={each} File=/dev/nvidia{minor}")),
    );
    let many = gpus.len();
    lines.extend([
        String::new(),
        "# slurm.conf".to_owned(),
        format!("GresTypes=gpu,{word}"),
        format!(
            "NodeName={name} Gres=gpu:{many},{word}:{} # and what this line has already",
            each as usize * many
        ),
        "SelectType=select/cons_tres".to_owned(),
        "ProctrackType=proctrack/cgroup".to_owned(),
        "TaskPlugin=task/cgroup # and what this line has already".to_owned(),
        "PrologFlags=Alloc,Contain".to_owned(),
        "Prolog=/usr/libexec/sublet/slurm/prolog".to_owned(),
        "TaskProlog=/usr/libexec/sublet/slurm/task-prolog".to_owned(),
        "Epilog=/usr/libexec/sublet/slurm/epilog".to_owned(),
        String::new(),
        "# cgroup.conf".to_owned(),
        "ConstrainDevices=yes".to_owned(),
    ]);
    Ok(lines.join("\n"))
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
