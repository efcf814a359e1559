//! Slurm: what a job got, read from Slurm's own words, and the lines of gres.conf and slurm.conf for this node.

mod allocation;
mod gres;
mod job_share;

pub(crate) use allocation::{Allocation, allocation};
pub(crate) use gres::{Unit, gres};
pub(crate) use job_share::{in_order, job_share};
