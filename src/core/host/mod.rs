//! What the kernel reports about this boot and the surroundings of this process. It is asked in one place, so that all
//! callers get the same answer.

pub mod boot_id;
pub(crate) mod cgroup_layout;
pub mod user_namespace;
