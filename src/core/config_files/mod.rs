//! The files of the configuration: `/etc/sublet/config.toml` with its `conf.d` directories, and `containers.toml`. Found,
//! read, merged and checked; with no file at all the defaults hold.

mod check;
mod containers;
mod error;
mod load;

#[cfg(fuzzing)]
pub use containers::parse as parse_containers;
pub use containers::{ContainerRule, Containers, containers_path, load_containers};
pub use error::ConfigError;
pub use error::{explain, position};
#[cfg(fuzzing)]
pub use load::of_text;
pub use load::{load, load_runtime, sources};
