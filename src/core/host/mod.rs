//! What the host's kernel says of itself and of its processes.

pub mod selinux;
