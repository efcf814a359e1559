//! Lists the CDI devices: each named share on each device that it fits, and the reason where it does not.
//! No I/O, but for a look at the nodes that CUDA does without. Current leases do not count: a share keeps its CDI device on a device that is full.

use std::collections::BTreeMap;
use std::io;

use sublet_core::admit::{Candidate, lease_for};
use sublet_core::config::Config;
use sublet_core::grant::{Grant, GrantedNode, Image, grant};
use sublet_core::inventory::{Device, Inventory, check_node};
use sublet_core::ledger::{Container, LeaseId, Ledger};
use sublet_core::oci::cdi::Asked;
use sublet_core::place::{Placement, only, place, wants_mig};
use sublet_core::process::Process;
use sublet_core::request::{self, Request};

/// The CDI devices, and the shares that have none.
#[derive(Debug, Default)]
pub struct Listing {
    /// The devices, by share and GPU.
    pub devices: Vec<Named>,
    /// The shares or devices for which there is no CDI device.
    pub without: Vec<Without>,
}

/// One CDI device.
#[derive(Clone, Debug)]
pub struct Named {
    /// The name that follows `sublet/share=`.
    pub name: String,
    /// Share and device.
    pub asked: Asked,
    /// NVML's index of the GPU.
    pub index: u32,
    /// The number that names the device in `sublet.gpu`: `0`, or `0:2` of a MIG device.
    pub number: String,
    /// What every container with this device is given: the nodes and `env.set` of this grant.
    pub grant: Grant,
}

/// A share that has no CDI device, or not on this device, or not by its plain name.
#[derive(Debug, PartialEq, Eq)]
pub struct Without {
    /// The name that does not exist.
    pub name: String,
    /// The reason.
    pub why: String,
}

/// The CDI devices of `config`'s named shares on the devices of `inventory`.
pub fn list(config: &Config, inventory: &Inventory) -> io::Result<Listing> {
    // The hook checks what is free when a container starts.
    let host = Host { config, idle: inventory.idle() };
    let mut listing = Listing::default();
    for share in config.share.keys() {
        match host.wanted(share) {
            Ok(request) => host.of_share(share, &request, &mut listing)?,
            Err(why) => listing.without.push(Without { name: share.clone(), why }),
        }
    }
    Ok(listing)
}

struct Host<'a> {
    config: &'a Config,
    /// What is there, as if nothing used it.
    idle: Inventory,
}

impl Host<'_> {
    /// The request of `share`, if a single device can serve it and CDI can name it.
    fn wanted(&self, share: &str) -> Result<Request, String> {
        // SPEC.md, "Kind requirements": a device's name ends as it begins.
        if !share.ends_with(|last: char| last.is_ascii_alphanumeric()) {
            return Err(
                "the name of a CDI device has to end with a letter or digit: rename the share".to_owned()
            );
        }
        let is_index = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b':');
        let of_another = share
            .rsplit_once('.')
            .filter(|(before, index)| self.config.share.contains_key(*before) && is_index(index));
        if let Some((before, index)) = of_another {
            return Err(format!(
                "its name would mean share {before} on GPU {index}: rename one of the two shares"
            ));
        }
        let request = request::parse(&BTreeMap::new(), Some(share), None, self.config);
        let request = request.map_err(|error| error.to_string())?;
        if self.idle.gpus().next().is_none() { Err("this host has no GPU".to_owned()) } else { Ok(request) }
    }

    fn of_share(&self, share: &str, request: &Request, listing: &mut Listing) -> io::Result<()> {
        let (mut here, mig) = (Vec::new(), wants_mig(request));
        if mig && !self.idle.devices.iter().any(Device::is_mig) {
            let why =
                "it needs a MIG device, and this host has none: `sublet mig apply` creates them".to_owned();
            listing.without.push(Without { name: share.to_owned(), why });
        }
        for device in self.idle.devices.iter().filter(|device| device.is_mig() == mig) {
            let name = format!("{share}.{}", device.number());
            match self.on_device(request, device)? {
                Ok(grant) => {
                    let asked = Asked { share: share.to_owned(), device: device.uuid.clone() };
                    here.push(Named { name, asked, index: device.index, number: device.number(), grant });
                }
                Err(why) => listing.without.push(Without { name, why }),
            }
        }
        match &here[..] {
            [] => {}
            [one] => here.insert(0, Named { name: share.to_owned(), ..one.clone() }),
            [first, ..] => {
                let kind = if mig { "MIG devices" } else { "GPUs" };
                let why = format!("{} {kind} can serve it: name one, such as {}", here.len(), first.name);
                listing.without.push(Without { name: share.to_owned(), why });
            }
        }
        listing.devices.append(&mut here);
        Ok(())
    }

    /// The grant of a container with that share on `device`, whatever its image.
    fn on_device(&self, request: &Request, device: &Device) -> io::Result<Result<Grant, String>> {
        let Host { config, idle } = self;
        let request = match only(request, &device.uuid, idle, config) {
            Ok(request) => request,
            Err(why) => return Ok(Err(why)),
        };
        if !request.default_directory {
            return Ok(Err("its default_directory = false needs sublet-runtime".to_owned()));
        }
        let id = LeaseId::random()?;
        let placement = match place(&request, &id, idle, &Ledger::empty(""), config) {
            // The file is for containers of other times.
            Ok(placement) => Placement { neighbours: None, ..placement },
            Err(refusal) => return Ok(Err(refusal.to_string())),
        };
        let container = Container::default();
        let candidate = Candidate { container, owner: Process::current()?, engine: None };
        let image = Image::default();
        let lease = lease_for(&candidate, &placement, &image, id, config);
        let mut grant = grant(&placement, &lease, &request.capabilities, &image, idle, &request.over(config));
        let root = &config.driver.root;
        grant.nodes.retain(|GrantedNode { node, .. }| !node.is_optional() || check_node(root, node).is_ok());
        Ok(Ok(grant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::inventory::ComputeMode;
    use sublet_core::place::fixture::{GIB, device, host, part, process};

    fn listed(toml: &str, inventory: &Inventory) -> Listing {
        list(&toml::from_str(toml).unwrap(), inventory).unwrap()
    }

    fn names(listing: &Listing) -> Vec<(&str, &str)> {
        listing.devices.iter().map(|named| (named.name.as_str(), named.asked.device.as_str())).collect()
    }

    fn why<'a>(listing: &'a Listing, name: &str) -> &'a str {
        let found = listing.without.iter().find(|without| without.name == name);
        &found.unwrap_or_else(|| panic!("{name}: {:?}", listing.without)).why
    }

    #[test]
    fn a_share_has_a_device_on_each_gpu_it_fits_and_its_plain_name_if_that_is_one() {
        let mut small = device(1);
        small.memory_bytes = 10 * GIB;
        let host = host(vec![device(0), small]);
        let listing = listed("[share.a]\nsm = 25\n[share.b]\nmemory = '20GiB'\n[share.c]\ngpu = 1\n", &host);
        assert_eq!(
            names(&listing),
            [
                ("a.0", "GPU-0"),
                ("a.1", "GPU-1"),
                ("b", "GPU-0"),
                ("b.0", "GPU-0"),
                ("c", "GPU-1"),
                ("c.1", "GPU-1")
            ]
        );
        assert_eq!(why(&listing, "a"), "2 GPUs can serve it: name one, such as a.0");
        assert!(why(&listing, "b.1").contains("10 GiB, of which"), "{:?}", listing.without);
        assert_eq!(why(&listing, "c.0"), "its sublet.gpu names other GPUs");
    }

    #[test]
    fn what_is_so_for_the_moment_changes_nothing() {
        let mut busy = device(0);
        busy.memory_free_bytes = 0;
        busy.compute_mode = ComputeMode::ExclusiveProcess;
        busy.processes = vec![process(1, 1, GIB)];
        let toml =
            "[share.a]\nmode = 'exclusive'\n[share.b]\nmemory = '20GiB'\n[share.c]\nmode = 'time-slice'\n";
        let (busy, idle) = (listed(toml, &host(vec![busy])), listed(toml, &host(vec![device(0)])));
        assert_eq!(names(&busy), names(&idle));
        assert_eq!(busy.devices.len(), 6);
        assert_eq!(busy.without, []);
    }

    #[test]
    fn shares_of_mig_devices_have_one_on_each_that_fits() {
        let gpu = Device { mig_enabled: true, ..device(0) };
        let parts = [part(&gpu, 0, "1g.18gb"), part(&gpu, 1, "1g.18gb"), part(&gpu, 2, "2g.35gb")];
        let mut host = host(vec![gpu, device(1)]);
        host.devices.splice(1..1, parts);
        let toml = "[share.a]\nmig = '1g.18gb'\n[share.b]\nmig = '2g.35gb'\nsm = 50\n[share.c]\ngpu = '0:1'\n\
                    [share.d]\nsm = 25\n[share.e]\nmode = 'mig'\ngpu = 1\n[share.'a.0:9']\nsm = 5\n";
        let listing = listed(toml, &host);
        let expected = [
            ("a.0:0", "MIG-0"),
            ("a.0:1", "MIG-1"),
            ("b", "MIG-2"),
            ("b.0:2", "MIG-2"),
            ("c", "MIG-1"),
            ("c.0:1", "MIG-1"),
            ("d", "GPU-1"),
            ("d.1", "GPU-1"),
        ];
        assert_eq!(names(&listing), expected);
        assert_eq!(why(&listing, "a"), "2 MIG devices can serve it: name one, such as a.0:0");
        assert!(why(&listing, "a.0:2").contains("none is a 1g.18gb: 0:2 is a 2g.35gb"));
        assert!(why(&listing, "d.0").contains("is in MIG mode"), "{:?}", listing.without);
        assert_eq!(why(&listing, "e.0:0"), "its sublet.gpu names other GPUs");
        assert!(why(&listing, "a.0:9").contains("its name would mean share a on GPU 0:9"));
    }

    #[test]
    fn shares_of_several_devices_of_mig_and_with_ambiguous_names_have_none() {
        let host = host(vec![device(0), device(1)]);
        let toml = "[share.two]\ngpu = 'any:2'\n[share.all]\ngpu = 'all'\n[share.mig]\nmig = '1g.18gb'\n\
                    [share.end-]\nsm = 5\n[share.a]\nsm = 5\n[share.'a.7']\nsm = 5\n[share.'a.b']\nsm = 5\n";
        let listing = listed(toml, &host);
        let found: Vec<_> = names(&listing).into_iter().map(|(name, _)| name).collect();
        assert_eq!(found, ["a.0", "a.1", "a.b.0", "a.b.1"]);
        assert!(why(&listing, "two.0").contains("several"), "{:?}", listing.without);
        assert!(why(&listing, "all.1").contains("several"));
        assert!(why(&listing, "mig").contains("it needs a MIG device, and this host has none"));
        assert!(why(&listing, "end-").contains("rename"));
        assert_eq!(
            why(&listing, "a.7"),
            "its name would mean share a on GPU 7: rename one of the two shares"
        );
    }
}
