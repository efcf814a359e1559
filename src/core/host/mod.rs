//! What the kernel says of this boot and of where this process runs: asked here, so that all have one answer.

pub mod boot_id;
pub(crate) mod cgroup_layout;
pub mod user_namespace;
