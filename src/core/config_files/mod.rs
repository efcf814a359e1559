//! Finds, reads, merges and checks the configuration files: `/etc/sublet/config.toml` with its `conf.d` directories,
//! and `containers.toml`. Without any file the defaults apply.

mod containers;
mod error;
mod load;

#[cfg(feature = "fixtures")]
pub use containers::parse as parse_containers;
pub use containers::{ContainerRule, Containers, Known, containers_path, load_containers, read_containers};
pub use error::ConfigError;
pub use error::{explain, position};
#[cfg(feature = "fixtures")]
pub use load::of_text;
pub use load::{ConfigFiles, OneFile, ParsedFiles, each, load, load_files, sources, sources_with};
