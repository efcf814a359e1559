//! `sublet mig make|clear`: entry points run these for containers under `[mig] dynamic`. They are not meant for users.

use std::io::Read as _;
use std::process::ExitCode;

use anyhow::Context as _;

use crate::mig::{self, Fence, Making, NotMade, Nvml, Uninterrupted};
use crate::mps_daemons;
use sublet_core::admit::{Local, MakeAnswer, MakeAsk, fresh_inventory};
use sublet_core::config::Config;
use sublet_core::inventory;
use sublet_core::ledger::{Ledger, Store};

/// Creates an instance for the ask on standard input and writes the answer to standard output.
pub fn make(config: &Config) -> anyhow::Result<ExitCode> {
    let mut text = String::new();
    std::io::stdin().take(1 << 16).read_to_string(&mut text).context("standard input")?;
    let ask: MakeAsk = serde_json::from_str(&text).context("only sublet's own programs call this command")?;
    let store = Store::open(&config.state_dir)?;
    let answer = match changed(&store, config, Some(&ask)) {
        Ok(()) => {
            // The waiting entry point reads the inventory, and so do all other programs.
            crate::refresh::refresh(config)?;
            MakeAnswer::Made
        }
        Err(error) => {
            let temporary = error.downcast_ref::<NotMade>().is_none_or(|error| error.temporary);
            MakeAnswer::NotMade { reason: super::tables::chain(&error), temporary }
        }
    };
    // The entry point that waited for the instance may have been killed meanwhile.
    Local::new(config).destroy_unneeded(&store);
    println!("{}", serde_json::to_string(&answer)?);
    Ok(ExitCode::SUCCESS)
}

/// Destroys the instances that no lease needs any more.
///
/// # Errors
/// The driver does not answer, or an instance is still in use.
pub fn clear(config: &Config) -> anyhow::Result<ExitCode> {
    let store = Store::open(&config.state_dir)?;
    changed(&store, config, None)?;
    Ok(ExitCode::SUCCESS)
}

/// While other users of the GPU are kept out: destroys the instances that no lease needs, then creates the requested
/// one.
fn changed(store: &Store, config: &Config, ask: Option<&MakeAsk>) -> anyhow::Result<()> {
    // The inventory as last written is enough: only the path of the driver's library is needed.
    let inventory = inventory::last(config).or_else(|_| fresh_inventory(config))?;
    let mut nvml = Nvml::open(config, &inventory)?;
    if let Some(ask) = ask {
        let mut ledger = store.read()?;
        ledger.stop_awaiting(&ask.awaited.lease);
        has_room(ask, &mut nvml, &ledger, config)?;
    }
    let (mut fence, _, freed) = Fence::raise(&[], store)?;
    Local::new(config).settle(&freed, store);
    let held = Uninterrupted::begin();
    let mut making = Making::new(&mut nvml, store);
    let cleared =
        making.clear(ask.map(|ask| &ask.awaited.lease), &mut |uuid| stop_servers(uuid, store, config));
    let made = cleared.map_err(anyhow::Error::from).and_then(|left| {
        for line in left {
            eprintln!("sublet: warning: {line}");
        }
        Ok(ask.map_or(Ok(()), |ask| making.make(&ask.order, &ask.awaited, config.placement.policy))?)
    });
    drop(held);
    if !making.touched {
        fence.nothing_changed();
    }
    let freed = making.freed;
    drop(fence);
    Local::new(config).settle(&freed, store);
    made
}

/// Checks for room first: if there is none, other commands need not wait.
fn has_room(ask: &MakeAsk, nvml: &mut Nvml, ledger: &Ledger, config: &Config) -> Result<(), NotMade> {
    // Instances of other leases that come and go do not count, nor do driver errors that they cause.
    if ledger.has_unneeded() || ledger.mig.under_way.is_some() {
        return Ok(());
    }
    match mig::foresee(&ask.order, nvml, ledger, config.placement.policy, &[]) {
        Ok(Err(none)) => Err(NotMade { reason: none.reason, temporary: none.temporary }),
        _ => Ok(()),
    }
}

/// A daemon ends before its device does, even if it would otherwise wait for its next lease (`[mps] idle`).
pub(super) fn stop_servers(uuid: &str, store: &Store, config: &Config) {
    let Ok(ledger) = store.read() else { return };
    let of_device = ledger.daemons.iter().filter(|daemon| daemon.serves(uuid));
    for daemon in of_device.filter(|daemon| ledger.on_daemon(&daemon.key).next().is_none()) {
        match mps_daemons::stop(&daemon.key, false, store, config) {
            Ok(warnings) => warnings.iter().for_each(|line| eprintln!("sublet: warning: {line}")),
            Err(error) => eprintln!("sublet: warning: {error}"),
        }
    }
}
