//! `sublet probe`: reports what the container that it runs in got. `sublet doctor --run` runs it there.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::tables;
use crate::doctor::{self, Seen};

/// The probe's output, one line.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "DoctorRun")]
pub struct Probed {
    /// What a CUDA program sees.
    #[serde(flatten)]
    pub seen: Seen,
    /// Whether /dev and /proc show no GPU but the container's own.
    pub neighbours_hidden: bool,
}

/// Runs it.
pub fn run() -> anyhow::Result<ExitCode> {
    // Read before CUDA starts: the container as it was given.
    let shown = shown(Path::new("/"));
    let seen = doctor::look().map_err(anyhow::Error::msg)?;
    let neighbours_hidden = shown <= seen.devices;
    tables::json(&Probed { seen, neighbours_hidden })?;
    Ok(ExitCode::SUCCESS)
}

/// The number of visible GPUs, by device nodes or by the driver's /proc files. For a hidden GPU the directory is
/// empty, or its file is empty or cannot be read.
fn shown(root: &Path) -> usize {
    let names = |path: &str| {
        let entries = fs::read_dir(root.join(path)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    let minor = |name: &String| name.strip_prefix("nvidia").is_some_and(|minor| minor.parse::<u32>().is_ok());
    let nodes = names("dev").iter().filter(|name| minor(name)).count();
    let gpus = "proc/driver/nvidia/gpus";
    let is_told = |bus: &&String| {
        fs::read(root.join(gpus).join(bus).join("information")).is_ok_and(|text| !text.is_empty())
    };
    nodes.max(names(gpus).iter().filter(is_told).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_shows_by_its_node_or_its_information() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let gpus = "proc/driver/nvidia/gpus";
        assert_eq!(shown(root.path()), 0);
        file("dev/nvidia0", "");
        file("dev/nvidiactl", "");
        file("dev/nvidia-caps/nvidia-cap1", "");
        file(&format!("{gpus}/0000:10:00.0/information"), "Model: NVIDIA H200\n");
        // Hides the other GPUs: a tmpfs over the directory, or /dev/null over the file.
        fs::create_dir_all(root.path().join(gpus).join("0000:11:00.0")).unwrap();
        file(&format!("{gpus}/0000:12:00.0/information"), "");
        assert_eq!(shown(root.path()), 1);
        file(&format!("{gpus}/0000:11:00.0/information"), "Model: NVIDIA H200\n");
        assert_eq!(shown(root.path()), 2);
        file("dev/nvidia1", "");
        file("dev/nvidia2", "");
        assert_eq!(shown(root.path()), 3);
    }
}
