//! `sublet refresh`: asks the driver for its devices and writes the inventory.

use std::process::Command;
use std::time::Duration;

use sublet_core::config::{Config, TimeSlice};
use sublet_core::inventory::{Device, Inventory, LeftOut};
use sublet_core::place;
use sublet_core::process::child::{self, ChildError};
use sublet_core::process::sublet::PATH;
use sublet_core::text::safe;

use crate::refresh::{boot, refresh};

/// nvidia-smi may have to wake the driver first.
const SMI_LIMIT: Duration = Duration::from_secs(20);

/// Arguments of `sublet refresh`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Print errors only
    #[arg(long)]
    quiet: bool,
    /// Prepare for the first container: load the driver's modules, create missing device nodes and their
    /// links in /dev/char, and wait up to 50 s for the driver. A host without a GPU is no error
    #[arg(long)]
    boot: bool,
}

/// Runs it.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    let found = if arguments.boot { boot(config)? } else { Some(refresh(config)?) };
    let Some(inventory) = found else {
        println!("This host has no NVIDIA GPU.");
        return Ok(());
    };
    // NVML has no call for it, and the driver forgets it when it is reloaded, so each refresh sets it anew (nvidia-smi,
    // "compute-policy").
    for gpu in inventory.gpus() {
        let Some(slice) = place::rule(gpu, config).and_then(|rule| rule.time_slice) else { continue };
        if let Err(why) = set_time_slice(&gpu.uuid, slice, &inventory) {
            let Device { index, uuid, .. } = gpu;
            eprintln!("sublet: warning: the time slice of GPU {index} ({uuid}) could not be set: {why}");
        }
    }
    if !arguments.quiet {
        let unknown = inventory.costs();
        crate::terminal::warn(inventory.left_out.iter().map(LeftOut::sentence).chain(unknown));
        let (devices, files) = (inventory.gpus().count(), inventory.files.len());
        println!("Driver {}: {devices} GPUs, {files} driver files.", inventory.driver.version);
    }
    Ok(())
}

/// Sets the slice length that the `[[device]]` rule of a GPU names.
fn set_time_slice(uuid: &str, slice: TimeSlice, inventory: &Inventory) -> Result<(), String> {
    let smi = inventory.driver.smi.as_ref();
    let smi = smi.ok_or("nvidia-smi is not installed (Debian: apt install nvidia-smi)")?;
    let number = (slice as u8).to_string();
    let arguments = ["compute-policy", "-i", uuid, "--set-timeslice", &number];
    match child::run(Command::new(smi).env_clear().env("PATH", PATH).args(arguments), "", SMI_LIMIT) {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => Err(safe(format!("{}{}", done.stdout, done.stderr).trim())),
        Err(ChildError::Timeout) => Err(format!("nvidia-smi took longer than {} s", SMI_LIMIT.as_secs())),
        Err(ChildError::Io(error)) => Err(format!("{}: {error}", smi.display())),
    }
}
