//! `sublet mig make|clear`: what the doors have done for containers under `[mig] dynamic`; not for people.

use std::io::Read as _;
use std::process::ExitCode;

use anyhow::Context as _;

use crate::admit::{self, MakeAnswer, MakeAsk, fresh_inventory};
use crate::config::Config;
use crate::inventory;
use crate::ledger::{Freed, Store};
use crate::mig::{Fence, Making, NotMade, Nvml, Uninterrupted};
use crate::mps;

/// Makes an instance for the ask on standard input; the answer goes to standard output.
///
/// # Errors
/// The ask cannot be read.
pub fn make(config: &Config) -> anyhow::Result<ExitCode> {
    let mut text = String::new();
    std::io::stdin().take(1 << 16).read_to_string(&mut text).context("standard input")?;
    let ask: MakeAsk = serde_json::from_str(&text).context("sublet's own programs alone call this")?;
    let store = Store::open(&config.state_dir)?;
    let made =
        changed(&store, config, |making| making.make(&ask.order, &ask.awaited, config.placement.policy));
    let answer = match made.and_then(|made| Ok(made?)) {
        Ok(()) => {
            // The door that waits reads it, and so does everybody else.
            super::refresh(config)?;
            MakeAnswer::Made
        }
        Err(error) => {
            let temporary = error.downcast_ref::<NotMade>().is_none_or(|error| error.temporary);
            MakeAnswer::NotMade { reason: super::output::chain(&error), temporary }
        }
    };
    // Who waited for it may have been killed meanwhile.
    admit::clear_made(&store);
    println!("{}", serde_json::to_string(&answer)?);
    Ok(ExitCode::SUCCESS)
}

/// Destroys those that nobody needs any more.
///
/// # Errors
/// The driver does not answer, or one is in use still.
pub fn clear(config: &Config) -> anyhow::Result<ExitCode> {
    let store = Store::open(&config.state_dir)?;
    changed(&store, config, |_| ())?;
    Ok(ExitCode::SUCCESS)
}

/// Behind the fence: destroys what nobody needs, and then does what is wanted.
fn changed<T>(
    store: &Store,
    config: &Config,
    change: impl FnOnce(&mut Making<'_>) -> T,
) -> anyhow::Result<T> {
    // As last written: the driver's library is all that is needed of it.
    let inventory = inventory::last(config).or_else(|_| fresh_inventory(config))?;
    let mut nvml = Nvml::open(config, &inventory)?;
    let (fence, _, freed) = Fence::raise(&[], store)?;
    admit::settle(&freed, store, config);
    let held = Uninterrupted::begin();
    let mut making = Making { driver: &mut nvml, store, freed: Freed::new() };
    let left = making.clear(&mut |uuid| stop_servers(uuid, store, config))?;
    let done = change(&mut making);
    let freed = std::mem::take(&mut making.freed);
    drop(held);
    drop(fence);
    admit::settle(&freed, store, config);
    for line in left {
        eprintln!("sublet: warning: {line}");
    }
    Ok(done)
}

/// No daemon outlives its device, though daemons otherwise stay (`[mps] stop_when_idle = false`).
fn stop_servers(uuid: &str, store: &Store, config: &Config) {
    let Ok(ledger) = store.read() else { return };
    for server in ledger.servers.iter().filter(|server| server.device == uuid) {
        match mps::stop(&server.key, false, store, config) {
            Ok(warnings) => warnings.iter().for_each(|line| eprintln!("sublet: warning: {line}")),
            Err(error) => eprintln!("sublet: warning: {error}"),
        }
    }
}
