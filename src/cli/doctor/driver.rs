//! The driver: its modules, nodes, settings and MPS programs.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use super::{Host, Outcome, fail, joined, pass, skip, warn};
use crate::probe::{self, Fabric, OLDEST_BRANCH, driver_nodes};
use crate::sick_gpus;
use sublet_core::fs::read_proc_devices;
use sublet_core::inventory::{self, ComputeMode, Majors, MissingPrograms, MpsPrograms, Node, check_node};
use sublet_core::ledger::Drain;
use sublet_core::text::{safe, safe_path};

/// The kernel module and its version.
pub(super) fn loaded(host: &Host<'_>) -> Outcome {
    let version = match inventory::fingerprint(host.config) {
        Ok(seen) => seen.driver_version,
        Err(error) => {
            return fail(error.to_string()).fix("modprobe nvidia (no such module: install the driver)");
        }
    };
    let branch: u32 = version.split('.').next().and_then(|part| part.parse().ok()).unwrap_or(0);
    if branch < OLDEST_BRANCH {
        return fail(format!("{version} is too old"))
            .fix(format!("install a driver of branch {OLDEST_BRANCH} or later"));
    }
    pass(version)
}

/// Whether the fabric manager runs where the host has `NVSwitches`: until it has set them up, CUDA starts on no GPU.
pub(super) fn fabric(host: &Host<'_>) -> Outcome {
    let switches =
        fs::read_dir(host.driver("/proc/driver/nvidia-nvswitch/devices")).into_iter().flatten().count();
    if switches == 0 {
        return by_nvml(&ask_fabrics(host).unwrap_or_default());
    }
    let proc = host.at("/proc");
    // The kernel cuts names after 15 characters.
    let runs = |pid: i32| {
        let name = fs::read(proc.join(pid.to_string()).join("comm")).unwrap_or_default();
        name.trim_ascii_end() == b"nv-fabricmanage"
    };
    if crate::proc::processes(&proc).into_iter().any(runs) {
        return pass(format!("{switches} NVSwitches, and the fabric manager runs"));
    }
    fail(format!(
        "{switches} NVSwitches and no fabric manager: CUDA ends with error 802 (\"system not yet \
         initialized\")"
    ))
    .fix("systemctl enable --now nvidia-fabricmanager (its package must have the driver's version)")
}

/// How far each GPU in an `NVLink` fabric is, by its index. NVML has answered just now where there is an inventory.
fn ask_fabrics(host: &Host<'_>) -> Option<Vec<(u32, Fabric)>> {
    let (nvml, _) = (!host.quick && host.inventory.is_ok()).then(|| probe::connect(host.config).ok())??;
    let of = |index| Some((index, probe::fabric(&nvml.device_by_index(index).ok()?)?));
    Some((0..nvml.device_count().ok()?).filter_map(of).collect())
}

/// What NVML says where the host does not see the switches, as on GB200 and in virtual machines.
fn by_nvml(gpus: &[(u32, Fabric)]) -> Outcome {
    let words = |(index, state): &(u32, Fabric)| match state {
        Fabric::Joining => Some(format!("GPU {index} has not joined its NVLink fabric yet")),
        Fabric::Joined => None,
        Fabric::Failed => Some(format!("GPU {index} could not join its NVLink fabric")),
    };
    let apart = joined(gpus.iter().filter_map(words), ", ");
    match gpus.len() {
        0 => skip("no NVSwitch of this host's own"),
        count if apart.is_empty() => pass(format!("NVML: {count} GPUs have joined their NVLink fabric")),
        _ => fail(format!("NVML: {apart}: CUDA ends with error 802 (\"system not yet initialized\")"))
            .fix("start nvidia-fabricmanager where the switches are, for a virtual machine on its host; see its log"),
    }
}

/// The other kernel modules, by their majors.
pub(super) fn modules(host: &Host<'_>) -> Outcome {
    let majors = Majors::parse(&read_proc_devices(&host.config.driver.root).unwrap_or_default());
    if majors.nvidia.is_none() {
        return fail("nvidia is not loaded (not in /proc/devices)").fix("modprobe nvidia");
    }
    if majors.uvm.is_none() {
        return fail("nvidia-uvm is not loaded, so no CUDA program starts")
            .fix("modprobe nvidia-uvm && nvidia-modprobe -u -c0");
    }
    let mig = host.inventory.as_ref().is_ok_and(|inventory| inventory.gpus().any(|gpu| gpu.mig_enabled));
    if mig && majors.caps.is_none() {
        return fail("/proc/devices has no nvidia-caps, so there is no access to MIG instances")
            .fix("reload the driver, or reboot");
    }
    pass("nvidia and nvidia-uvm are loaded")
}

/// Every device node that containers with whole GPUs get: nvidiactl, one for each GPU, nvidia-uvm.
fn wanted(host: &Host<'_>) -> Vec<Node> {
    let is_uvm = |node: &Node| node.path.ends_with("nvidia-uvm");
    let mut nodes = driver_nodes(&host.config.driver.root);
    nodes.retain(|node| !node.path.ends_with("nvidia-uvm-tools") && !node.path.ends_with("nvidia-modeset"));
    nodes.sort_by_key(|node| (is_uvm(node), !node.path.ends_with("nvidiactl"), node.minor));
    nodes
}

/// Whether the nodes exist, and who may open them.
pub(super) fn nodes(host: &Host<'_>) -> Outcome {
    let nodes = wanted(host);
    if nodes.is_empty() {
        return fail("no device nodes, because no module is loaded").fix("see kernel-modules");
    }
    let wrong = nodes.iter().filter_map(|node| check_node(&host.config.driver.root, node).err());
    let wrong = joined(wrong.map(|error| error.to_string()), "; ");
    if !wrong.is_empty() {
        return fail(wrong).fix("run nvidia-smi as root, which creates them (or `nvidia-modprobe -u -c0`)");
    }
    let mode = |node: &Node| Some(fs::metadata(host.driver(&node.path.to_string_lossy())).ok()?.mode());
    permissions(nodes.len(), nodes.iter().filter_map(mode).fold(0o777, |all, mode| all & mode))
}

/// Checks the permissions `mode` that `count` nodes have in common.
fn permissions(count: usize, mode: u32) -> Outcome {
    match mode {
        _ if mode & 0o600 != 0o600 => fail(format!("mode {mode:04o}: not even root may open all {count}"))
            .fix("chmod 0666 /dev/nvidia*"),
        _ if mode & 0o006 == 0o006 => pass(format!(
            "{count} nodes, mode {mode:04o}: users of this host can use GPUs without sublet \
             (NVreg_DeviceFileMode=0660 prevents that)"
        )),
        _ => pass(format!(
            "{count} nodes, mode {mode:04o}: containers whose user is neither root nor in the nodes' group get no GPU"
        )),
    }
}

/// Whether NVML answers.
pub(super) fn nvml(host: &Host<'_>) -> Outcome {
    let inventory = match &host.inventory {
        Ok(inventory) => inventory,
        Err(error) => return fail(error.clone()).fix("do what the message says, then run `sublet refresh`"),
    };
    let costs = joined(inventory.costs(), "; ");
    if costs.is_empty() {
        return pass(format!("{} GPUs answer", inventory.gpus().count()));
    }
    warn(costs).fix("nothing, where the GPU does not have it; else see `dmesg | grep -i nvrm`")
}

/// Each GPU: whether it is served, and is well.
pub(super) fn gpus(host: &Host<'_>) -> Vec<Outcome> {
    let Ok(inventory) = &host.inventory else { return Vec::new() };
    let noted = sick_gpus::read(host.config);
    let unread =
        noted.as_ref().err().map(|error| fail(format!("health.json: {error}")).fix("sublet refresh"));
    let noted = noted.unwrap_or_default().warnings;
    let drain = |uuid: &str| host.ledger.as_ref().ok()?.drain_of(uuid).map(Drain::words);
    let gone = inventory.left_out.iter().map(|gone| {
        let (sentence, other) = (gone.sentence(), "as it says; it is served again by itself once it answers");
        let (found, fix) = sentence.split_once("; fix: ").unwrap_or((&sentence, other));
        fail(found).fix(fix)
    });
    let served = inventory.gpus().map(|gpu| {
        let drained = drain(&gpu.uuid).map_or_else(String::new, |words| format!(", drained {words}"));
        let found = format!("{}: {}{drained}", gpu.label(), safe(&gpu.name));
        match noted.get(&gpu.uuid).filter(|noted| !noted.is_empty()) {
            Some(noted) => warn(format!("{found}: {}", noted.join("; "))).fix("as it says"),
            None => pass(found),
        }
    });
    unread.into_iter().chain(gone).chain(served).collect()
}

/// Whether the inventory, which the shim and the hook read, is current.
pub(super) fn inventory(host: &Host<'_>) -> Outcome {
    match inventory::load(host.config) {
        Ok(inventory) => pass(format!("{} devices, up to date", inventory.devices.len())),
        Err(error) if error.wants_refresh() => warn(error.to_string()).fix("sublet refresh"),
        Err(error) => fail(error.to_string()).fix("see driver"),
    }
}

/// The nodes of MIG instances.
pub(super) fn caps(host: &Host<'_>) -> Outcome {
    let Ok(inventory) = &host.inventory else { return skip("unknown without an inventory") };
    let parts: Vec<_> = inventory.devices.iter().filter(|device| device.is_mig()).collect();
    let missing = parts.iter().flat_map(|device| &device.nodes);
    let missing = missing.filter(|node| check_node(&host.config.driver.root, node).is_err());
    let missing = joined(missing.map(|node| safe_path(&node.path)), " ");
    match (parts.len(), missing.is_empty()) {
        (0, _) => skip("no MIG instances"),
        (count, true) => pass(format!("all nodes of {count} MIG instances")),
        _ => warn(format!("missing: {missing}")).fix("run `nvidia-smi -L` as root, which creates them"),
    }
}

/// The nodes that systemd would not find when it applies the device rules of a scope again.
pub(super) fn unlinked(host: &Host<'_>) -> Vec<Node> {
    let there = |node: &Node| host.driver(&format!("/dev/char/{}:{}", node.major, node.minor)).exists();
    wanted(host).into_iter().filter(|node| !there(node)).collect()
}

/// Whether every node has its link `/dev/char/MAJOR:MINOR`.
pub(super) fn links(host: &Host<'_>) -> Outcome {
    let missing = unlinked(host);
    if missing.is_empty() {
        return pass(if wanted(host).is_empty() { "no nodes" } else { "every node has its link" });
    }
    let names = joined(missing.iter().map(|node| format!("{}:{}", node.major, node.minor)), " ");
    warn(format!("no link in /dev/char for {names}")).fix(make_links(&missing))
}

/// The command that creates the links.
pub(super) fn make_links(nodes: &[Node]) -> String {
    let link = |node: &Node| {
        let name = node.path.strip_prefix("/dev").unwrap_or(&node.path);
        format!("ln -s ../{} /dev/char/{}:{}", safe_path(name), node.major, node.minor)
    };
    joined(nodes.iter().map(link), " && ")
}

/// Whether the driver stays awake between containers.
pub(super) fn persistence(host: &Host<'_>) -> Outcome {
    if host.at("/run/nvidia-persistenced/socket").exists() {
        return pass("nvidia-persistenced runs");
    }
    if host.quick {
        return skip("no nvidia-persistenced; --quick does not ask for the persistence mode");
    }
    let smi = host.inventory.as_ref().ok().and_then(|inventory| inventory.driver.smi.as_ref());
    let query = ["--query-gpu=persistence_mode", "--format=csv,noheader"];
    let modes = smi.and_then(|smi| (host.ask)(&[&*smi.to_string_lossy(), query[0], query[1]]));
    if modes.is_some_and(|modes| modes.contains("Enabled") && !modes.contains("Disabled")) {
        return pass("persistence mode is on");
    }
    warn("the driver unloads when no process uses it: the next container waits for it, and settings are lost")
        .fix("systemctl enable --now nvidia-persistenced (or `nvidia-smi -pm 1`)")
}

/// Checks for compute modes that are neither the driver's default nor set by sublet.
pub(super) fn compute_modes(host: &Host<'_>) -> Outcome {
    let (Ok(inventory), Ok(ledger)) = (&host.inventory, &host.ledger) else {
        return skip("unknown without an inventory and a ledger");
    };
    let ours = |uuid: &str| ledger.compute_modes.iter().any(|changed| changed.device == uuid);
    let strange: Vec<_> =
        inventory.gpus().filter(|gpu| gpu.compute_mode != ComputeMode::Default && !ours(&gpu.uuid)).collect();
    if strange.is_empty() {
        return pass("DEFAULT, or set by sublet");
    }
    let found = strange.iter().map(|gpu| format!("GPU {} is {}", gpu.index, gpu.compute_mode));
    let found = format!("{}: this prevents time-slicing and dedicated MPS servers", joined(found, ", "));
    warn(found)
        .fix(joined(strange.iter().map(|gpu| format!("nvidia-smi -i {} -c DEFAULT", gpu.uuid)), " && "))
}

/// The package in Debian; other distributions include the programs in the driver's packages.
const INSTALL: &str = "apt install nvidia-cuda-mps (other distributions: part of the driver's packages)";

/// Whether both MPS programs exist in the driver's version. Checked are those that [`crate::mps_daemons`] would start.
pub(super) fn mps_programs(host: &Host<'_>) -> Outcome {
    let programs = MpsPrograms::find(&host.config.driver);
    let (control, server) = match programs.both(&host.config.driver) {
        Ok((control, server)) => (safe_path(control), safe_path(server)),
        Err(MissingPrograms::Control { .. }) => {
            let found = "nvidia-cuda-mps-control is not installed, so mode mps and memory limits do not work";
            return warn(found).fix(INSTALL);
        }
        Err(missing) => return fail(missing.to_string()).fix(INSTALL),
    };
    let mut found = format!("daemons run {control}, which starts {server}");
    if !programs.unused.is_empty() {
        found = format!(
            "{found}; not used: {}",
            joined(programs.unused.iter().map(|path| safe_path(path)), ", ")
        );
    }
    let Ok(inventory) = &host.inventory else { return pass(found) };
    // The programs do not print their version, and a server serves no client of another version. For a package that is
    // only named in another's dependencies dpkg-query prints nothing.
    let package = (host.ask)(&["dpkg-query", "-W", "-f=${Version}", "nvidia-cuda-mps"]);
    let driver = &inventory.driver.version;
    match package.filter(|version| !version.is_empty() && !version.contains(driver)) {
        Some(version) => {
            warn(format!("nvidia-cuda-mps is version {}, the driver is {driver}", safe(&version)))
                .fix("apt install --only-upgrade nvidia-cuda-mps, or load the driver of the same version")
        }
        None => pass(found),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Warn};
    use super::super::fake_host::{Fake, finding, passed, skipped};
    use super::*;
    use sublet_core::ledger::ChangedComputeMode;
    use sublet_core::place::fixture::{device, host, part};

    const VERSION: &str = "/proc/driver/nvidia/version";

    /// The type of the fixtures' nodes; creating real ones needs root.
    const DEVICES: &str = "Character devices:\n195 nvidia\n235 nvidia-uvm\n\nBlock devices:\n";

    #[test]
    fn the_driver_is_loaded_and_new_enough() {
        let fake = Fake::new();
        let (found, fix) = finding(loaded(&fake.host()), Fail);
        assert!(found.starts_with("no NVIDIA driver is loaded"), "{found}");
        assert!(fix.starts_with("modprobe nvidia"), "{fix}");
        fake.file(VERSION, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  x\n");
        assert_eq!(finding(loaded(&fake.host()), Fail).0, "470.82.01 is too old");
        fake.file(VERSION, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  x\n");
        assert_eq!(passed(loaded(&fake.host())), "580.159.04");
    }

    #[test]
    fn nvswitches_need_the_fabric_manager() {
        let fake = Fake::new();
        assert_eq!(skipped(fabric(&fake.host())), "no NVSwitch of this host's own");
        for bus in ["0000:07:00.0", "0000:08:00.0"] {
            fake.file(&format!("/proc/driver/nvidia-nvswitch/devices/{bus}"), "");
        }
        fake.file("/proc/7/comm", "nvidia-persiste\n");
        let (found, fix) = finding(fabric(&fake.host()), Fail);
        assert!(found.starts_with("2 NVSwitches and no fabric manager: CUDA ends with error 802"), "{found}");
        assert!(fix.contains("nvidia-fabricmanager"), "{fix}");
        fake.file("/proc/8/comm", "nv-fabricmanage\n");
        assert_eq!(passed(fabric(&fake.host())), "2 NVSwitches, and the fabric manager runs");
        assert_eq!(skipped(by_nvml(&[])), "no NVSwitch of this host's own");
        let all = [(0, Fabric::Joined), (3, Fabric::Joined)];
        assert_eq!(passed(by_nvml(&all)), "NVML: 2 GPUs have joined their NVLink fabric");
        let (found, fix) = finding(by_nvml(&[all[0], (1, Fabric::Joining), (3, Fabric::Failed)]), Fail);
        let apart =
            "NVML: GPU 1 has not joined its NVLink fabric yet, GPU 3 could not join its NVLink fabric: ";
        assert!(found.starts_with(apart) && fix.contains("nvidia-fabricmanager"), "{found}; {fix}");
    }

    #[test]
    fn modules_are_known_by_their_majors() {
        let fake = Fake::new();
        assert_eq!(finding(modules(&fake.host()), Fail).1, "modprobe nvidia");
        fake.file("/proc/devices", "Character devices:\n195 nvidia\n");
        assert_eq!(finding(modules(&fake.host()), Fail).1, "modprobe nvidia-uvm && nvidia-modprobe -u -c0");
        fake.file("/proc/devices", DEVICES);
        passed(modules(&fake.host()));
        let mut gpu = device(0);
        gpu.mig_enabled = true;
        let mig = Host { inventory: Ok(host(vec![gpu])), ..fake.host() };
        assert!(finding(modules(&mig), Fail).0.contains("no nvidia-caps"));
    }

    #[test]
    fn nodes_are_looked_for_by_minor() {
        let fake = Fake::new();
        assert_eq!(finding(nodes(&fake.host()), Fail).1, "see kernel-modules");
        fake.file("/proc/devices", DEVICES);
        fake.file("/proc/driver/nvidia/gpus/0000:3b:00.0/information", "Model: \t X\nDevice Minor: \t 3\n");
        let (found, _) = finding(nodes(&fake.host()), Fail);
        for name in ["nvidiactl is missing", "nvidia3 is missing", "nvidia-uvm is missing"] {
            assert!(found.contains(name), "{found}");
        }
        assert!(finding(permissions(3, 0o060), Fail).0.contains("not even root"));
        assert!(passed(permissions(3, 0o666)).contains("users of this host can use GPUs without sublet"));
        assert!(passed(permissions(3, 0o660)).contains("neither root nor in the nodes' group"));
    }

    #[test]
    fn nvml_and_the_inventory_say_why() {
        let fake = Fake::new();
        assert_eq!(passed(nvml(&fake.host())), "1 GPUs answer");
        let broken = Host { inventory: Err("NVML is missing".into()), ..fake.host() };
        assert_eq!(finding(nvml(&broken), Fail).0, "NVML is missing");
        assert_eq!(finding(inventory(&fake.host()), Warn).1, "sublet refresh");
        fake.link("/run/sublet/inventory.json", "elsewhere");
        finding(inventory(&fake.host()), Warn);
    }

    #[test]
    fn missing_nodes_of_instances_are_named() {
        let fake = Fake::new();
        assert_eq!(skipped(caps(&fake.host())), "no MIG instances");
        let mut instance = part(&device(0), 3, "1g.18gb");
        instance.nodes = vec![Node { path: "/dev/nvidia-caps/nvidia-cap30".into(), major: 241, minor: 30 }];
        let host = Host { inventory: Ok(host(vec![device(0), instance])), ..fake.host() };
        assert_eq!(finding(caps(&host), Warn).0, "missing: /dev/nvidia-caps/nvidia-cap30");
    }

    #[test]
    fn missing_links_come_with_the_command() {
        let fake = Fake::new();
        fake.file("/proc/devices", DEVICES).file("/dev/char/195:255", "");
        let (found, fix) = finding(links(&fake.host()), Warn);
        assert_eq!(found, "no link in /dev/char for 235:0");
        assert_eq!(fix, "ln -s ../nvidia-uvm /dev/char/235:0");
        fake.file("/dev/char/235:0", "");
        passed(links(&fake.host()));
    }

    #[test]
    fn persistence_is_the_daemons_or_the_old_mode() {
        let fake = Fake::new();
        finding(persistence(&fake.host()), Warn);
        skipped(persistence(&Host { quick: true, ..fake.host() }));
        let mut inventory = host(vec![device(0)]);
        inventory.driver.smi = Some("/usr/bin/nvidia-smi".into());
        let with = |ask| Host { ask, inventory: Ok(inventory.clone()), ..fake.host() };
        passed(persistence(&with(|_| Some("Enabled\n".into()))));
        finding(persistence(&with(|_| Some("Enabled\nDisabled\n".into()))), Warn);
        fake.file("/run/nvidia-persistenced/socket", "");
        passed(persistence(&fake.host()));
    }

    #[test]
    fn a_compute_mode_set_by_another_program_is_named() {
        let fake = Fake::new();
        passed(compute_modes(&fake.host()));
        let mut gpu = device(0);
        gpu.compute_mode = ComputeMode::ExclusiveProcess;
        let mut with = Host { inventory: Ok(host(vec![gpu])), ..fake.host() };
        let (found, fix) = finding(compute_modes(&with), Warn);
        assert!(found.starts_with("GPU 0 is EXCLUSIVE_PROCESS"), "{found}");
        assert_eq!(fix, "nvidia-smi -i GPU-0 -c DEFAULT");
        let ours = ChangedComputeMode { device: "GPU-0".into(), found: ComputeMode::Default };
        with.ledger.as_mut().unwrap().compute_modes.push(ours);
        passed(compute_modes(&with));
    }

    #[test]
    fn both_programs_are_needed() {
        let fake = Fake::new();
        let control = "/usr/local/nvidia/bin/nvidia-cuda-mps-control";
        assert!(finding(mps_programs(&fake.host()), Warn).0.contains("is not installed"));
        fake.program(control);
        let (found, fix) = finding(mps_programs(&fake.host()), Fail);
        assert!(found.contains(fake.path(control).to_str().unwrap()), "{found}");
        assert!(found.contains("nvidia-cuda-mps-server, which it starts, is not"), "{found}");
        assert!(fix.starts_with("apt install nvidia-cuda-mps"));
        fake.program("/usr/sbin/nvidia-cuda-mps-server");
        let shown = |path: &str| fake.path(path).display().to_string();
        assert_eq!(
            passed(mps_programs(&fake.host())),
            format!(
                "daemons run {}, which starts {}",
                shown(control),
                shown("/usr/sbin/nvidia-cuda-mps-server")
            )
        );
    }

    #[test]
    fn of_several_copies_the_first_whole_installation_is_used_and_the_rest_is_named() {
        let fake = Fake::new();
        for dir in ["/usr/local/nvidia/bin", "/opt/bin"] {
            for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
                fake.program(&format!("{dir}/{name}"));
            }
        }
        fake.program("/usr/bin/nvidia-cuda-mps-control");
        let shown = |path: &str| fake.path(path).display().to_string();
        assert_eq!(
            passed(mps_programs(&fake.host())),
            format!(
                "daemons run {}, which starts {}; not used: {}, {}, {}",
                shown("/usr/local/nvidia/bin/nvidia-cuda-mps-control"),
                shown("/usr/local/nvidia/bin/nvidia-cuda-mps-server"),
                shown("/usr/bin/nvidia-cuda-mps-control"),
                shown("/opt/bin/nvidia-cuda-mps-control"),
                shown("/opt/bin/nvidia-cuda-mps-server"),
            )
        );
    }

    #[test]
    fn the_package_is_of_the_drivers_version() {
        let fake = Fake::new();
        fake.program("/usr/bin/nvidia-cuda-mps-control").program("/usr/sbin/nvidia-cuda-mps-server");
        let other = Host { ask: |_| Some("535.216.03-1".into()), ..fake.host() };
        assert!(
            finding(mps_programs(&other), Warn)
                .0
                .starts_with("nvidia-cuda-mps is version 535.216.03-1, the driver is 580")
        );
        passed(mps_programs(&Host { ask: |_| Some(String::new()), ..fake.host() }));
        passed(mps_programs(&Host { ask: |_| Some("580.159.04-1".into()), ..fake.host() }));
        passed(mps_programs(&Host { inventory: Err("no driver".into()), ..fake.host() }));
    }
}
