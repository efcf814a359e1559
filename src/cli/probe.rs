//! `sublet probe`: what the container that it runs in got. `sublet doctor --run` puts it there.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

use super::output;
use crate::doctor::cuda::{self, Seen};

/// Its one line of output.
#[derive(Debug, Serialize, Deserialize)]
pub struct Probed {
    /// What a CUDA program sees.
    #[serde(flatten)]
    pub seen: Seen,
    /// Whether no GPU but the container's own shows in /dev and /proc.
    pub neighbours_hidden: bool,
}

/// Runs it.
///
/// # Errors
/// What CUDA says.
pub fn run() -> anyhow::Result<ExitCode> {
    let seen = cuda::look().map_err(anyhow::Error::msg)?;
    let neighbours_hidden = hidden(Path::new("/"), seen.devices);
    output::json(&Probed { seen, neighbours_hidden })?;
    Ok(ExitCode::SUCCESS)
}

/// Whether there are no more GPUs than CUDA sees.
fn hidden(root: &Path, devices: usize) -> bool {
    let names = |path: &str| {
        let entries = fs::read_dir(root.join(path)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    let minor = |name: &String| name.strip_prefix("nvidia").is_some_and(|minor| minor.parse::<u32>().is_ok());
    let nodes = names("dev").iter().filter(|name| minor(name)).count();
    let gpus = "proc/driver/nvidia/gpus";
    let told =
        names(gpus).iter().filter(|bus| root.join(gpus).join(bus).join("information").exists()).count();
    nodes <= devices && told <= devices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_shows_by_its_node_or_its_information() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        file("dev/nvidia0");
        file("dev/nvidiactl");
        file("proc/driver/nvidia/gpus/0000:10:00.0/information");
        assert!(hidden(root.path(), 1));
        file("proc/driver/nvidia/gpus/0000:11:00.0/information");
        assert!(!hidden(root.path(), 1));
        assert!(hidden(root.path(), 2));
        file("dev/nvidia1");
        file("dev/nvidia2");
        assert!(!hidden(root.path(), 2));
    }
}
