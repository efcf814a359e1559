//! `sublet cdi generate|list`: named shares as CDI devices.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use schemars::JsonSchema;
use serde::Serialize;

use super::tables::{self, Column, Format, Output};
use crate::cdi_spec::{self, FileError, Listing, Named, State, Without};
use sublet_core::admit::fresh_inventory;
use sublet_core::config::Config;
use sublet_core::oci::cdi::KIND;
use sublet_core::process::inheritance;
use sublet_core::text::{safe, safe_path};

/// Subcommands of `sublet cdi`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Write the CDI specification, with devices sublet/share=SHARE.GPU, or SHARE.G:M: MIG device M of GPU G
    Generate {
        /// The file, in a directory that engines read; default: [cdi] spec of the configuration
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// List the CDI devices, and say why a share has none
    List(Output),
}

/// Runs it.
///
/// # Errors
/// There is no inventory, or the file cannot be written.
pub fn run(command: &Command, config: &Config) -> anyhow::Result<()> {
    match command {
        Command::Generate { output } => generate(output.as_ref().unwrap_or(&config.cdi.spec), config),
        Command::List(Output { format }) => print(*format, config),
    }
}

fn generate(path: &Path, config: &Config) -> anyhow::Result<()> {
    // Only the configured directory is created: another one may be a misspelling.
    let missing = path.parent().filter(|directory| !directory.as_os_str().is_empty() && !directory.exists());
    if let Some(directory) = missing.filter(|directory| Some(*directory) != config.cdi.spec.parent()) {
        bail!("there is no directory {}: create it, or name another file", safe_path(directory));
    }
    let (listing, text) = specification(config)?;
    let shown = safe_path(path);
    if listing.devices.is_empty() {
        // Engines reject a specification without devices.
        let removed = if cdi_spec::remove(path)? { format!("; {shown} was removed") } else { String::new() };
        let Some(first) = listing.without.first() else {
            bail!("there are no CDI devices, because the configuration has no [share.<name>]{removed}")
        };
        bail!(
            "no named share fits a device of this host; {}: {} (`sublet cdi list` shows all of them){removed}",
            safe(&first.name),
            first.why
        );
    }
    let state = if cdi_spec::write(path, &text)? { "written" } else { "is current" };
    println!("{shown} {state}: {} CDI devices of {KIND}.", listing.devices.len());
    Ok(())
}

fn specification(config: &Config) -> anyhow::Result<(Listing, String)> {
    let listing = cdi_spec::list(config, &fresh_inventory(config)?).map_err(FileError::List)?;
    let program = sublet_core::oci::hooks::program().context(FileError::NoHook)?;
    let text = cdi_spec::render(&listing, &program, inheritance::honoured_config().as_deref());
    Ok((listing, text))
}

fn print(format: Format, config: &Config) -> anyhow::Result<()> {
    let (listing, text) = specification(config)?;
    let id = |name: &str| format!("{KIND}={name}");
    let devices = listing.devices.iter().map(|named| ListedDevice {
        name: id(&named.name),
        share: &named.asked.share,
        device: &named.asked.device,
        index: named.index,
        number: &named.number,
    });
    let without = listing.without.iter().map(|one| ListedWithout { name: id(&one.name), why: &one.why });
    let document = Document {
        schema: "sublet.cdi/1",
        devices: devices.collect(),
        without: without.collect(),
        file: &config.cdi.spec,
        state: state(&text, &listing, config),
    };
    tables::print(format, &document, || {
        let row = |named: &Named| vec![id(&named.name), named.number.clone(), named.asked.device.clone()];
        let rows: Vec<_> = listing.devices.iter().map(row).collect();
        let columns = [Column("CDI DEVICE", 0), Column("DEVICE", 0), Column("UUID", 1)];
        let table = tables::fitting(&columns, &rows, tables::terminal_width());
        let without = |one: &Without| format!("No {KIND}={}: {}\n", safe(&one.name), one.why);
        let without: String = listing.without.iter().map(without).collect();
        format!("{table}\n{without}{}: {}", safe_path(&config.cdi.spec), document.state)
    })
}

/// Compares the file that engines read now with what it should be.
fn state(text: &str, listing: &Listing, config: &Config) -> &'static str {
    match cdi_spec::state(&config.cdi.spec) {
        State::Ours(found) if found == text.as_bytes() => "current",
        State::Ours(_) => "out of date, run `sublet cdi generate`",
        State::Missing if listing.devices.is_empty() => "absent, as expected",
        State::Missing => "absent, run `sublet cdi generate`",
        State::Foreign => "not sublet's",
    }
}

/// What `list` prints as JSON.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "CdiList")]
pub struct Document<'a> {
    /// `sublet.cdi/1`.
    schema: &'static str,
    devices: Vec<ListedDevice<'a>>,
    without: Vec<ListedWithout<'a>>,
    /// The CDI specification that engines read.
    file: &'a Path,
    /// Whether that file has these devices, in words.
    state: &'a str,
}

#[derive(Serialize, JsonSchema)]
struct ListedDevice<'a> {
    /// For `docker run --device`.
    name: String,
    share: &'a str,
    /// UUID of the GPU or MIG device.
    device: &'a str,
    /// NVML's index of the GPU.
    index: u32,
    /// As in `sublet.gpu`: `0`, or `0:2` of a MIG device.
    number: &'a str,
}

/// A share that has no CDI device.
#[derive(Serialize, JsonSchema)]
struct ListedWithout<'a> {
    name: String,
    why: &'a str,
}
