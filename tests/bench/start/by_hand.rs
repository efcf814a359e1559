//! What sublet is compared with: its own edits written in by hand, the same with one mount for all libraries, and
//! NVIDIA's runtime in CDI mode, where it is installed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};
use sublet_e2e::Bundle;

use crate::scene::{Scene, TIME_SLICE, create};

/// The specification of a time-slice share as sublet edits it, without what names the lease.
pub fn edited(scene: &Scene) -> Result<Value> {
    let bundle = scene.bundle("edited", TIME_SLICE);
    bundle.write();
    scene.timed(scene.shim(&scene.builds[0], &create(&bundle))?)?;
    scene.collect()?;
    let mut spec = bundle.config();
    ensure!(spec != bundle.spec, "no share was given");
    let count = |spec: &Value| spec["mounts"].as_array().map_or(0, Vec::len);
    scene.mounts.set(count(&spec) - count(&bundle.spec));
    let annotations = spec["annotations"].as_object_mut().context("annotations")?;
    annotations.retain(|key, _| !key.starts_with("sublet."));
    Ok(spec)
}

/// Gives `bundle` the mounts, devices, environment and masked paths of `edited`, a bundle of the same kind.
pub fn give(bundle: &mut Bundle<'_>, edited: &Value) {
    let own = (bundle.spec["root"].clone(), bundle.spec["linux"]["cgroupsPath"].clone());
    let etc: Vec<Value> = of_engine(&bundle.spec);
    let mut spec = edited.clone();
    (spec["root"], spec["linux"]["cgroupsPath"]) = own;
    // The engine's own files are those of this bundle.
    let mounts = spec["mounts"].as_array_mut().expect("mounts");
    mounts.retain(|mount| !is_of_engine(mount));
    mounts.extend(etc);
    bundle.spec = spec;
}

fn is_of_engine(mount: &Value) -> bool {
    mount["destination"].as_str().is_some_and(|at| at.starts_with("/etc/"))
}

fn of_engine(spec: &Value) -> Vec<Value> {
    spec["mounts"].as_array().expect("mounts").iter().filter(|mount| is_of_engine(mount)).cloned().collect()
}

/// A directory in which each of the driver's libraries is mounted, and a specification that mounts it, with all that is
/// in it, where glibc looks for libraries of better processors.
pub struct Prepared {
    directory: PathBuf,
    pub spec: Value,
}

impl Prepared {
    pub fn of(scene: &Scene, edited: &Value) -> Result<Self> {
        let directory = scene.memory.path().join("prepared");
        std::fs::create_dir(&directory)?;
        let none = None::<&str>;
        let tmpfs = Some("tmpfs");
        mount(tmpfs, &directory, tmpfs, MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=755"))?;
        let mut spec = edited.clone();
        let mounts = spec["mounts"].as_array_mut().context("mounts")?;
        let library = |mount: &Value| {
            let at = PathBuf::from(mount["destination"].as_str()?);
            let name = at.file_name()?.to_str()?;
            (mount["type"] == "bind" && name.contains(".so")).then(|| at.clone())
        };
        let mut homes = BTreeSet::new();
        for mounted in mounts.iter() {
            let (Some(at), Some(source)) = (library(mounted), mounted["source"].as_str()) else { continue };
            homes.insert(at.parent().context("a directory")?.to_owned());
            let file = directory.join(at.file_name().context("a name")?);
            std::fs::write(&file, "")?;
            mount(Some(Path::new(source)), &file, none, MsFlags::MS_BIND, none)?;
        }
        mounts.retain(|mount| library(mount).is_none());
        // Shortest first: those below it, as vdpau's, are few.
        let home =
            homes.iter().min_by_key(|home| home.as_os_str().len()).context("no library was mounted")?;
        mounts.push(json!({
            "destination": home.join("glibc-hwcaps/x86-64-v2"), "type": "bind", "source": directory,
            "options": ["rbind", "rro", "rnosuid", "rnodev", "rprivate"]
        }));
        Ok(Self { directory, spec })
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        // Detached with all that is mounted in it.
        let _ = umount2(&self.directory, MntFlags::MNT_DETACH);
    }
}

/// NVIDIA's runtime and its configuration.
pub struct Nvidia {
    pub program: PathBuf,
    /// `XDG_CONFIG_HOME` for it.
    pub configuration: PathBuf,
}

impl Nvidia {
    /// `None`: it is not installed.
    pub fn find(scene: &Scene) -> Result<Option<Self>> {
        let (Some(program), Some(toolkit)) = (in_path("nvidia-container-runtime"), in_path("nvidia-ctk"))
        else {
            return Ok(None);
        };
        let configuration = scene.world.dir.path().join("nvidia");
        let (own, cdi) = (configuration.join("nvidia-container-runtime"), configuration.join("cdi"));
        std::fs::create_dir_all(&own)?;
        std::fs::create_dir_all(&cdi)?;
        let text = format!(
            "[nvidia-container-runtime]\nmode = \"cdi\"\nruntimes = [\"{}\"]\nlog-level = \"error\"\n\
             [nvidia-container-runtime.modes.cdi]\nspec-dirs = [\"{}\"]\ndefault-kind = \"nvidia.com/gpu\"\n",
            scene.world.engine.program(),
            cdi.display()
        );
        std::fs::write(own.join("config.toml"), text)?;
        let mut generate = Command::new(toolkit);
        generate.args(["cdi", "generate"]).arg(format!("--output={}", cdi.join("nvidia.yaml").display()));
        let generated = generate.output()?;
        ensure!(generated.status.success(), "nvidia-ctk: {}", String::from_utf8_lossy(&generated.stderr));
        Ok(Some(Self { program, configuration }))
    }

    /// A bundle that asks it for all GPUs.
    pub fn bundle<'a>(scene: &'a Scene, name: &str) -> Bundle<'a> {
        let mut bundle = scene.bundle(name, &[]);
        let environment = bundle.spec["process"]["env"].as_array_mut().expect("env");
        environment.push(json!("NVIDIA_VISIBLE_DEVICES=all"));
        bundle
    }
}

/// The program of this name in PATH.
pub fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|program| program.is_file())
}
