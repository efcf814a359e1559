//! Files that others may have had their hands on: replaced as a whole, believed only where nobody else could write them,
//! found below a root without leaving it.

pub mod atomic;
pub mod below;
pub mod selinux;
pub mod trusted;
