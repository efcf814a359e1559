//! What MIG instance would have to be made for a request that finds none (`[mig] dynamic`). Pure; which profile
//! and where, the driver's own tables tell later.

use serde::{Deserialize, Serialize};

use super::select::{hosts, wants_mig};
use crate::config::Config;
use crate::inventory::{Device, Inventory};
use crate::ledger::Ledger;
use crate::request::{Devices, Mode, Request};

/// An instance that would serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The GPUs that may have it.
    pub sites: Vec<Site>,
    /// As `1g.18gb` or `1c.2g.35gb`; `None`: the smallest that is large enough.
    pub profile: Option<String>,
}

/// A GPU, and what the instance must have there at least.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// `GPU-…`.
    pub gpu: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub sms: u64,
}

impl Order {
    /// What `request` needs, if it is for one MIG device and does not name which; without sites where no GPU that
    /// may have it is in MIG mode.
    #[must_use]
    pub fn of(request: &Request, inventory: &Inventory, ledger: &Ledger, config: &Config) -> Option<Self> {
        let one = match &request.devices {
            Devices::Any(count) => count.get() == 1,
            Devices::All => false,
            Devices::These(selectors) => selectors.len() == 1 && !selectors[0].is_mig(),
        };
        if !one || !wants_mig(request) || request.mode == Some(Mode::Exclusive) {
            return None;
        }
        let sites = hosts(request, inventory, config)
            .filter(|gpu| gpu.mig_enabled && !ledger.drained.contains(&gpu.uuid))
            .map(|gpu| site(request, gpu))
            .collect();
        Some(Self { sites, profile: request.mig.clone() })
    }
}

/// With mode mig memory and SMs say what the device must have at least, as of one that is there.
fn site(request: &Request, gpu: &Device) -> Site {
    let alone = matches!(request.mode, None | Some(Mode::Mig));
    let memory = request.memory.filter(|_| alone).map(|memory| memory.on(gpu.memory_bytes));
    let sms = request.sm.filter(|_| alone).zip(gpu.sm_count).map(|(sm, all)| sm.of(all.into()));
    Site { gpu: gpu.uuid.clone(), memory_bytes: memory.unwrap_or(0), sms: sms.unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{GIB, device, host, request};
    use super::*;
    use crate::request::{Memory, Percent, Selector};

    fn mig_host() -> Inventory {
        let mut gpus: Vec<Device> = (0..3).map(device).collect();
        gpus[0].mig_enabled = true;
        gpus[1].mig_enabled = true;
        gpus[1].sm_count = Some(100);
        host(gpus)
    }

    fn order(request: &Request, drained: &[&str]) -> Option<Order> {
        let drained = drained.iter().map(|uuid| (*uuid).to_owned()).collect();
        let ledger = Ledger { drained, ..Ledger::empty("boot") };
        Order::of(request, &mig_host(), &ledger, &Config::default())
    }

    fn gpus(order: Option<Order>) -> Vec<String> {
        order.map(|order| order.sites.into_iter().map(|site| site.gpu).collect()).unwrap_or_default()
    }

    #[test]
    fn gpus_in_mig_mode_that_are_meant_and_not_drained_may_have_it() {
        let profile = Request { mig: Some("1g.18gb".into()), ..request(Mode::Mig) };
        assert_eq!(gpus(order(&profile, &[])), ["GPU-0", "GPU-1"]);
        assert_eq!(gpus(order(&profile, &["GPU-0"])), ["GPU-1"]);
        let on = |selector| Request { devices: Devices::These(vec![selector]), ..profile.clone() };
        assert_eq!(gpus(order(&on(Selector::Index(1)), &[])), ["GPU-1"]);
        assert_eq!(order(&on(Selector::Index(2)), &[]).unwrap().sites, [], "MIG mode is off");
        for selector in [Selector::MigIndex(0, 0), Selector::MigUuid("MIG-1".into())] {
            assert_eq!(order(&on(selector), &[]), None);
        }
        assert_eq!(order(&Request { devices: Devices::All, ..profile.clone() }, &[]), None);
        assert_eq!(order(&request(Mode::TimeSlice), &[]), None, "it is for whole GPUs");
        let mps = Request { mig: Some("1g.18gb".into()), ..request(Mode::Mps) };
        assert_eq!(gpus(order(&mps, &[])), ["GPU-0", "GPU-1"]);
    }

    #[test]
    fn what_it_must_have_at_least_is_of_the_gpu() {
        let wanted = Request {
            memory: Some(Memory::Bytes(8 * GIB)),
            sm: Some(Percent::from_thousandths(25_000)),
            ..request(Mode::Mig)
        };
        let site = order(&wanted, &["GPU-0"]).unwrap().sites.remove(0);
        assert_eq!((site.memory_bytes, site.sms), (8 * GIB, 25));
        let shared = Request { mig: Some("1g.18gb".into()), mode: Some(Mode::Mps), ..wanted };
        let site = order(&shared, &["GPU-0"]).unwrap().sites.remove(0);
        assert_eq!((site.memory_bytes, site.sms), (0, 0), "they are of the instance");
    }
}
