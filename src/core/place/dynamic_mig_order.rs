//! Which MIG instance a request that finds none needs (`[mig] dynamic`). No I/O; the profile
//! and the place are chosen later, from the driver's own tables.

use serde::{Deserialize, Serialize};

use super::select::{mig_hosts, rule, wants_mig};
use crate::config::{Config, Use};
use crate::inventory::{Device, Inventory};
use crate::ledger::Ledger;
use crate::request::Request;
use crate::share::{Devices, MIB, Memory, Mode, Percent};

/// An instance that would serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The GPUs that may have it.
    pub sites: Vec<Site>,
    /// As `1g.18gb` or `1c.2g.35gb`; `None`: the smallest that is large enough.
    pub profile: Option<String>,
}

/// A GPU, and the minimum of the instance there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// `GPU-…`.
    pub gpu: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub sms: u64,
    /// The maximum that the instance may have, if a policy limits its user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most: Option<Most>,
}

/// The user's policy for the instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Most {
    /// In addition to the user's leases.
    pub now: Size,
    /// Without them.
    pub ever: Size,
}

/// How large an instance may be; `u64::MAX` if nothing limits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Streaming multiprocessors.
    pub sms: u64,
    /// Memory in bytes.
    pub memory_bytes: u64,
}

impl Size {
    /// The largest instance on `gpu` on which `request` takes at most `sm` thousandths of a percent of the GPU's SMs
    /// and `memory` bytes.
    pub fn within(request: &Request, gpu: &Device, (sm, memory): (Option<u64>, Option<u64>)) -> Self {
        let whole = u64::from(Percent::WHOLE.thousandths());
        let of_gpu = |sm: u64| sm.saturating_mul(gpu.sm_count.unwrap_or_default().into()) / whole;
        // The memory of a share is rounded down to MiB.
        let of_share = |most: u64, share: Percent| {
            let most = u128::from(most.saturating_add(MIB - 1)) * u128::from(whole);
            u64::try_from(most / u128::from(share.thousandths().max(1))).unwrap_or(u64::MAX)
        };
        let sms = sm.filter(|_| is_alone(request)).map(of_gpu);
        let memory = memory.and_then(|most| match request.memory {
            _ if is_alone(request) => Some(most),
            Some(Memory::Share(share)) => Some(of_share(most, share)),
            // The request does not depend on the size of the instance.
            _ => None,
        });
        Self { sms: sms.unwrap_or(u64::MAX), memory_bytes: memory.unwrap_or(u64::MAX) }
    }
}

impl Order {
    /// The order of `request`, if it is for one unnamed MIG device. There are no sites if no permitted
    /// GPU is in MIG mode.
    pub fn of(request: &Request, inventory: &Inventory, ledger: &Ledger, config: &Config) -> Option<Self> {
        let one = match &request.devices {
            Devices::Any(count) => count.get() == 1,
            Devices::All => false,
            Devices::These(selectors) => selectors.len() == 1 && !selectors[0].is_mig(),
        };
        if !one || !wants_mig(request) || request.mode == Some(Mode::Exclusive) {
            return None;
        }
        let sites = mig_hosts(request, inventory, config)
            .into_iter()
            .filter(|gpu| gpu.mig_enabled && !ledger.drained.contains(&gpu.uuid))
            .filter(|gpu| rule(gpu, config).is_none_or(|rule| rule.fixed_use != Some(Use::None)))
            // Any instance created there would be refused.
            .filter(|gpu| !is_alone(request) || request.sm.is_none() || gpu.sm_count.is_some())
            .map(|gpu| site(request, gpu))
            .collect();
        Some(Self { sites, profile: request.mig.clone() })
    }
}

/// With mode mig, memory and SMs are the minimum for the device, as for an existing one.
fn site(request: &Request, gpu: &Device) -> Site {
    let alone = is_alone(request);
    let memory = request.memory.filter(|_| alone).map(|memory| memory.on(gpu.memory_bytes));
    let sms = request.sm.filter(|_| alone).zip(gpu.sm_count).map(|(sm, all)| sm.of(all.into()));
    Site { gpu: gpu.uuid.clone(), memory_bytes: memory.unwrap_or(0), sms: sms.unwrap_or(0), most: None }
}

/// Whether the container gets the whole instance.
const fn is_alone(request: &Request) -> bool {
    matches!(request.mode, None | Some(Mode::Mig))
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{GIB, device, host, request};
    use super::*;
    use crate::share::Selector;

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
    fn the_least_memory_and_sms_are_counted_of_the_gpu() {
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

    #[test]
    fn a_cap_is_a_size_of_the_instance_where_that_counts() {
        let gpu = mig_host().devices.remove(1);
        let most = (Some(20_999), Some(8 * GIB));
        let alone = Size::within(&request(Mode::Mig), &gpu, most);
        assert_eq!(alone, Size { sms: 20, memory_bytes: 8 * GIB });
        let free = Size { sms: u64::MAX, memory_bytes: u64::MAX };
        assert_eq!(Size::within(&request(Mode::Mig), &gpu, (None, None)), free);
        let bytes = Request { memory: Some(Memory::Bytes(GIB)), ..request(Mode::Mps) };
        assert_eq!(Size::within(&bytes, &gpu, most), free);
        let half = Memory::Share(Percent::from_thousandths(50_000));
        let half = Size::within(&Request { memory: Some(half), ..request(Mode::Mps) }, &gpu, most);
        assert_eq!((half.sms, half.memory_bytes / MIB), (u64::MAX, (16 * GIB / MIB) + 1));
    }
}
