//! What a node tells Docker Swarm: how many containers of each named share its GPUs hold. Swarm counts each by itself.

use std::io;

use crate::setup::docker::RESOURCE;
use crate::stack;
use sublet_core::config::Config;
use sublet_core::inventory::Inventory;

/// How many containers of a named share fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    /// The share's name.
    pub share: String,
    /// On all devices, when nothing else is on them.
    pub fits: usize,
    /// Why not one more.
    pub why: String,
}

/// Each named share of `config` on the devices of `inventory`.
pub fn counts(config: &Config, inventory: &Inventory) -> io::Result<Vec<Count>> {
    let count = |share: &String| {
        let (fits, why) = stack::most(share, inventory, config)?;
        Ok(Count { share: share.clone(), fits, why })
    };
    config.share.keys().map(count).collect()
}

/// The generic resources of dockerd for `counts`, such as `sublet-small=4`.
pub fn resources(counts: &[Count]) -> Vec<String> {
    let fitting = counts.iter().filter(|count| count.fits > 0);
    fitting.map(|Count { share, fits, .. }| format!("{RESOURCE}{share}={fits}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::place::fixture::{GIB, device, host};

    fn of(toml: &str, inventory: &Inventory) -> Vec<String> {
        resources(&counts(&toml::from_str(toml).unwrap(), inventory).unwrap())
    }

    #[test]
    fn each_share_is_counted_on_empty_gpus_by_itself() {
        let mut busy = device(1);
        (busy.memory_free_bytes, busy.memory_bytes) = (0, 50 * GIB);
        let two = host(vec![device(0), busy]);
        let text = "[share.quarter]\nsm = 25\n[share.large]\nmemory = '60GiB'\nsm = 10\n\
                    [share.first]\ngpu = 0\nsm = 50\n[share.whole]\nmode = 'exclusive'\n\
                    [share.both]\ngpu = 'any:2'\n[share.none]\nmemory = '200GiB'\n";
        let expected =
            ["sublet-first=2", "sublet-large=1", "sublet-quarter=8", "sublet-whole=2"].map(str::to_owned);
        let mut found = of(text, &two);
        let both = found.remove(0);
        assert!(both.starts_with("sublet-both="), "{both}");
        assert_eq!(found, expected);
        let none = counts(&toml::from_str("[share.none]\nmemory = '200GiB'\n").unwrap(), &two).unwrap();
        assert_eq!(none[0].fits, 0);
        assert!(none[0].why.contains("200 GiB") || none[0].why.contains("204800"), "{}", none[0].why);
        assert!(of("", &two).is_empty() && of("[share.a]\nsm = 25\n", &host(vec![])).is_empty());
    }
}
