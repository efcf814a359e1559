//! Files that other users may have access to: replacing them atomically, trusting them only if no other user could have
//! written them, and finding them below a root without leaving it.

pub mod atomic;
pub mod below;
pub mod history;
pub mod looked_for;
pub mod proc_devices;
pub mod selinux;
pub mod trusted;
