//! `sublet explain`: what a share, a stack of services or a container gets, or why it gets nothing. Changes nothing.

mod answer;
mod of_container;
mod of_share;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::doctor::ask;
use super::tables::Format;
#[cfg(test)]
pub use {
    of_container::Document as OfContainer,
    of_share::{Document as OfShare, StackDocument as OfStack},
};

use crate::doctor::has_hook;
use crate::setup::docker::Dockerd;
use crate::stack;
use sublet_core::config::Config;

/// Arguments of `sublet explain`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Explain the container of this OCI bundle
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
    /// The share, such as sm=25 memory=8GiB: short for --annotation sublet.sm=25 --annotation sublet.memory=8GiB
    #[arg(value_parser = super::share, value_name = "KEY=VALUE", conflicts_with_all = ["name", "image", "service", "container"])]
    share: Vec<(String, String)>,
    /// An annotation of the container; overrides the bundle's
    #[arg(long = "annotation", value_parser = super::annotation, value_name = "KEY=VALUE")]
    annotations: Vec<(String, String)>,
    /// Explain what containers.toml gives to a container of this name
    #[arg(long, value_name = "NAME", conflicts_with_all = ["bundle", "annotations"])]
    name: Option<String>,
    /// Explain what containers.toml gives to a container of this image
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["bundle", "annotations"])]
    image: Option<String>,
    /// Explain what containers.toml gives to a task of this Swarm service
    #[arg(long, value_name = "SERVICE", conflicts_with_all = ["bundle", "annotations"])]
    service: Option<String>,
    /// Explain a container that runs, has ended or was refused, by its name or id
    #[arg(long, value_name = "CONTAINER", conflicts_with_all = ["bundle", "annotations", "name", "image", "service"])]
    container: Option<String>,
    /// Check the services of Compose files together: which would get their share on this host, which not, and why
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["share", "bundle", "annotations", "name", "image", "service", "container"])]
    compose: Vec<PathBuf>,
    /// Check Quadlet's .container files together, as --compose does
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["share", "bundle", "annotations", "name", "image", "service", "container", "compose"])]
    quadlet: Vec<PathBuf>,
    /// Show the environment, device nodes and mounts too; with --bundle, the edits to config.json
    #[arg(long, conflicts_with_all = ["container", "compose", "quadlet"])]
    edits: bool,
    /// Answer as if nothing were on the GPUs: no container and no other process
    #[arg(long, conflicts_with = "container")]
    empty: bool,
    /// Answer for your own rootless containers, even if you may use Docker's socket
    #[arg(long)]
    rootless: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Runs it.
///
/// # Errors
/// A request that would be refused is refused here with the same words.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    let root = Path::new("/");
    if let Some(container) = &arguments.container {
        of_container::run(container, arguments, config)?;
    } else if !arguments.compose.is_empty() {
        let stack = stack::compose(&arguments.compose, default_runtime().as_deref(), has_hook(root))?;
        return of_share::run_stack(&stack, arguments, config);
    } else if !arguments.quadlet.is_empty() {
        let mut stack = stack::quadlet(&arguments.quadlet)?;
        stack.remarks.extend((!has_hook(root)).then(|| NO_HOOK.to_owned()));
        return of_share::run_stack(&stack, arguments, config);
    } else {
        of_share::run(arguments, config)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Said where Podman ignores annotations.
const NO_HOOK: &str = "Podman runs no hook of sublet's (sublet setup podman): annotations alone do nothing";

/// dockerd's default runtime, if it is not Docker's own: as it says, else as it would be started.
fn default_runtime() -> Option<String> {
    let name = ask(&["docker", "info", "--format", "{{.DefaultRuntime}}"]).map(|name| name.trim().to_owned());
    let dockerd = || {
        let dockerd = Dockerd::of(Path::new("/"), ask, None);
        dockerd.default_runtime(&std::fs::read_to_string(dockerd.file()).unwrap_or_default())
    };
    name.filter(|name| !name.is_empty()).or_else(dockerd).filter(|runtime| runtime != "runc")
}
