//! The kernel's reports about this boot and this process's namespaces and cgroups. It is asked in one place, so that all
//! callers get the same answer.

pub mod boot_id;
pub(crate) mod cgroup_layout;
pub mod user_namespace;
