//! Real Slurm: the plugins of a node, and whole clusters.

mod slurm;
mod slurm_edges;
mod slurm_mps;
mod slurm_nodes;
mod slurm_tasks;
