//! Tests of the environment of a grant, and the values with which the other tests begin.

use super::*;
#[path = "../../../tests/harness/src/frameworks.rs"]
mod frameworks;

use crate::config::VisibleDevices;
use crate::inventory::{
    ComputeMode, Driver, DriverFile, FileKind, Fingerprint, Majors, Node, Virtualization,
};
use crate::ledger::{Container, DaemonKey, LeaseId, fixture};
use crate::process::Process;
use crate::share::{Capability, Isolation, Mode, Percent, Priority};

/// The environment of the grant for `lease`.
fn environment(lease: &Lease, inventory: &Inventory, config: &Config) -> Environment {
    super::list_environment(lease, Some(2), lease.library_dir.as_deref(), inventory, config)
}

const MIB: u64 = 1 << 20;

fn device(index: u32, minor: u32, bus_id: &str) -> Device {
    let node = |path: String, major, minor| Node { path: path.into(), major, minor };
    Device {
        uuid: format!("GPU-{index}"),
        index,
        minor,
        bus_id: bus_id.to_owned(),
        name: "NVIDIA H200".to_owned(),
        compute_capability: (9, 0),
        sm_count: Some(132),
        memory_bytes: 143_155 * MIB,
        memory_free_bytes: 142_000 * MIB,
        memory_of_host: false,
        unknown: std::collections::BTreeMap::default(),
        mig_enabled: false,
        compute_mode: ComputeMode::Default,
        display_active: false,
        virtualization: Virtualization::None,
        dri_nodes: vec![node(format!("/dev/dri/renderD{}", 128 + index), 226, 128 + index)],
        nodes: vec![node(format!("/dev/nvidia{minor}"), 195, minor)],
        processes: Vec::new(),
        mig_device: None,
    }
}

fn file(source: &str, kind: FileKind, capability: Capability) -> DriverFile {
    DriverFile { source: source.into(), kind, capability, needs: None }
}

fn library(soname: &str, also: &[&str], capability: Capability) -> DriverFile {
    let also = also.iter().map(|&name| name.to_owned()).collect();
    let kind = FileKind::Library { soname: soname.to_owned(), also };
    file(&format!("/host/{soname}.580"), kind, capability)
}

/// Two GPUs whose minors differ from their indexes, and a file of each kind.
pub(super) fn inventory() -> Inventory {
    Inventory {
        schema: "sublet.inventory/1".to_owned(),
        fingerprint: Fingerprint {
            boot_id: String::new(),
            driver_version: "580.159.04".to_owned(),
            gpus: Vec::new(),
            mig: Vec::new(),
        },
        probed_at: 0,
        mig_changes: 0,
        driver: Driver {
            version: "580.159.04".to_owned(),
            cuda: (13, 0),
            simulated: false,
            mps_control: None,
            mps_missing: None,
            smi: None,
            majors: Majors { nvidia: Some(195), uvm: Some(510), caps: Some(241) },
            mig_caps: [None, None],
        },
        devices: vec![device(0, 3, "0000:3b:00.0"), device(1, 1, "0000:86:00.0")],
        left_out: Vec::new(),
        links: Vec::new(),
        directories: Vec::new(),
        files: vec![
            library("libcuda.so.1", &[], Capability::Compute),
            library("libnvidia-ml.so.1", &["libnvidia-ml.so"], Capability::Utility),
            library("libEGL_nvidia.so.0", &[], Capability::Graphics),
            library("libnvcuvid.so.1", &[], Capability::Video),
            file("/host/nvidia-smi", FileKind::Program { name: "nvidia-smi".into() }, Capability::Utility),
            file(
                "/host/icd.json",
                FileKind::Data { path: "/usr/share/vulkan/icd.d/nvidia_icd.json".into() },
                Capability::Graphics,
            ),
        ],
    }
}

/// `docker run --annotation sublet.mode=mps --annotation sublet.sm=25 --annotation sublet.memory=8GiB`.
pub(super) fn lease() -> Lease {
    Lease {
        id: LeaseId::parse("0123456789abcdef").unwrap(),
        container: Container {
            uid: 0,
            id: "c1".to_owned(),
            bundle: "/b".into(),
            rootfs: "/b/rootfs".into(),
            record: "/r".into(),
        },
        mode: Mode::Mps,
        daemon: Some(DaemonKey("GPU-0".to_owned())),
        sm: Some(Percent::from_thousandths(25_000)),
        memory_bytes: Some(8192 * MIB),
        owner: Process { pid: 1, start_time: 2 },
        ..fixture::lease(1, "GPU-0")
    }
}

pub(super) fn time_slice() -> Lease {
    Lease { mode: Mode::TimeSlice, daemon: None, sm: None, memory_bytes: None, ..lease() }
}

pub(super) fn placement(lease: &Lease) -> Placement {
    Placement {
        devices: lease.devices.clone(),
        mig_devices: Vec::new(),
        mode: lease.mode,
        isolation: lease.isolation,
        daemon: lease.daemon.clone(),
        sm: lease.sm,
        memory_bytes: lease.memory_bytes,
        processes: lease.processes,
        priority: lease.priority,
        guard: lease.guard,
        suspend: lease.suspend,
        mig_caps: Vec::new(),
        refresh_first: false,
        neighbours: Some(2),
        warnings: vec!["from the placement".to_owned()],
    }
}

pub(super) fn debian() -> Image {
    Image { library_dir: Some("/usr/lib/x86_64-linux-gnu".into()), ..Image::default() }
}

pub(super) fn granted(lease: &Lease, capabilities: &[Capability], image: &Image, config: &Config) -> Grant {
    grant(&placement(lease), lease, &Capabilities(capabilities.to_vec()), image, &inventory(), config)
}

fn set(lease: &Lease, config: &Config) -> Vec<String> {
    let env = environment(lease, &inventory(), config).set;
    env.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
}

#[test]
fn a_share_of_an_mps_server() {
    assert_eq!(
        set(&lease(), &Config::default()),
        [
            "CUDA_VISIBLE_DEVICES=0",
            "NVIDIA_VISIBLE_DEVICES=void",
            "SUBLET_DEVICES=GPU-0",
            "SUBLET_MODE=mps",
            "SUBLET_PROCESSES=1",
            "CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M",
            "SUBLET_MEMORY_BYTES=8589934592",
            // 8192 MiB less 24 + 32 × 3.75 MiB, of 143155 MiB: 0.05622
            "SUBLET_MEMORY_FRACTION=0.056",
            "SUBLET_SM_PERCENT=25",
        ]
    );
}

#[test]
fn several_devices_are_limited_by_their_server_and_not_by_the_environment() {
    let lease = Lease {
        devices: vec!["GPU-1".to_owned(), "GPU-0".to_owned()],
        isolation: Isolation::Dedicated,
        daemon: Some(DaemonKey("0123456789abcdef".to_owned())),
        ..lease()
    };
    let mut inventory = inventory();
    let env = |inventory: &Inventory| {
        let env = environment(&lease, inventory, &Config::default()).set;
        env.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
    };
    let expected = [
        "CUDA_VISIBLE_DEVICES=0,1",
        "NVIDIA_VISIBLE_DEVICES=void",
        "SUBLET_DEVICES=GPU-1,GPU-0",
        "SUBLET_MODE=mps",
        "SUBLET_PROCESSES=1",
        "CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        "SUBLET_MEMORY_BYTES=8589934592",
        "SUBLET_MEMORY_FRACTION=0.056",
        "SUBLET_SM_PERCENT=25",
    ];
    assert_eq!(env(&inventory), expected);
    // A fraction that stays within the share on both devices: that of the larger one.
    inventory.devices[1].memory_bytes /= 2;
    assert_eq!(env(&inventory), expected);
    inventory.devices[1].memory_bytes *= 4;
    assert!(env(&inventory).contains(&"SUBLET_MEMORY_FRACTION=0.028".to_owned()));
    // For an unknown device there is no fraction.
    inventory.devices.pop();
    assert!(!env(&inventory).iter().any(|entry| entry.starts_with("SUBLET_MEMORY_FRACTION")));
}

#[test]
fn each_process_gets_its_part() {
    let lease = Lease {
        processes: 3,
        sm: Some(Percent::from_thousandths(37_500)),
        memory_bytes: Some(10_000 * MIB),
        priority: Priority::Low,
        ..lease()
    };
    let set = set(&lease, &Config::default());
    assert!(set.contains(&"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=12.5".to_owned()));
    assert!(set.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3333M".to_owned()));
    assert!(set.contains(&"CUDA_MPS_CLIENT_PRIORITY=1".to_owned()));
    assert!(set.contains(&"SUBLET_SM_PERCENT=12.5".to_owned()));
    assert!(set.contains(&"SUBLET_MEMORY_BYTES=3494903808".to_owned()));
}

#[test]
fn without_a_server_nothing_of_mps_remains() {
    let environment = environment(&time_slice(), &inventory(), &Config::default());
    let names: Vec<_> = environment.set.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "CUDA_VISIBLE_DEVICES",
            "NVIDIA_VISIBLE_DEVICES",
            "SUBLET_DEVICES",
            "SUBLET_MODE",
            "SUBLET_PROCESSES"
        ]
    );
    assert!(environment.remove_prefixes.contains(&"CUDA_MPS_".to_owned()));
    assert_eq!(environment.default, []);
}

#[test]
fn memory_under_time_slicing_has_a_server_at_the_whole_gpu() {
    let lease = Lease { mode: Mode::TimeSlice, sm: None, ..lease() };
    let set = set(&lease, &Config::default());
    assert!(!set.iter().any(|entry| entry.starts_with("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")));
    assert!(set.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M".to_owned()));
    // 8192 MiB less 24 + 132 × 3.75 MiB, of 143155 MiB: 0.0536
    assert!(set.contains(&"SUBLET_MEMORY_FRACTION=0.053".to_owned()));
}

#[test]
fn a_limit_below_the_context_has_no_fraction() {
    let lease = Lease { memory_bytes: Some(100 * MIB), ..lease() };
    assert!(!set(&lease, &Config::default()).iter().any(|entry| entry.starts_with("SUBLET_MEMORY_FRACTION")));
}

#[test]
fn devices_by_ordinal_by_uuid_and_of_mig() {
    let two = Lease { devices: vec!["GPU-0".to_owned(), "GPU-1".to_owned()], ..time_slice() };
    assert_eq!(set(&two, &Config::default())[0], "CUDA_VISIBLE_DEVICES=0,1");
    let mut config = Config::default();
    config.grant.visible_devices = Some(VisibleDevices::Uuid);
    assert_eq!(set(&two, &config)[0], "CUDA_VISIBLE_DEVICES=GPU-0,GPU-1");
    let mig = Lease { devices: vec!["MIG-7".to_owned()], ..time_slice() };
    assert_eq!(set(&mig, &Config::default())[0], "CUDA_VISIBLE_DEVICES=MIG-7");
    assert_eq!(set(&two, &Config::default())[1], "NVIDIA_VISIBLE_DEVICES=void");
    config.grant.nvidia_visible_devices = Some(VisibleDevices::Uuid);
    assert_eq!(set(&two, &config)[1], "NVIDIA_VISIBLE_DEVICES=GPU-0,GPU-1");
}

#[test]
fn the_environment_has_the_neighbours_if_the_configuration_says_so() {
    let neighbours = |config: &Config| {
        set(&lease(), config)
            .into_iter()
            .filter(|entry| entry.starts_with("SUBLET_NEIGH"))
            .collect::<Vec<_>>()
    };
    let mut config = Config::default();
    assert_eq!(neighbours(&config), [""; 0]);
    config.grant.tell_neighbours = true;
    assert_eq!(neighbours(&config), ["SUBLET_NEIGHBOURS=2"]);
}

#[test]
fn the_program_for_the_share_is_mounted_where_there_is_room() {
    let with = Image { share_program: Some("/usr/libexec/sublet/sublet-share".into()), ..debian() };
    let mounts = |image: &Image| granted(&lease(), &[], image, &Config::default()).mounts;
    let program = Mount {
        source: "/usr/libexec/sublet/sublet-share".into(),
        destination: "/usr/bin/sublet-share".into(),
    };
    assert!(mounts(&with).contains(&program) && !mounts(&debian()).contains(&program));
}

#[test]
fn templates_are_filled_or_left_out() {
    let mut config = Config::default();
    config.grant.env = [
        ("A", "${SUBLET_SM_PERCENT}/${SUBLET_MEMORY_BYTES}!"),
        ("B", "${SUBLET_NOTHING}"),
        ("C", "${SUBLET_SM_PERCENT"),
        ("D", "plain $5"),
    ]
    .map(|(name, text)| (name.to_owned(), text.to_owned()))
    .into();
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let of = |lease: &Lease| environment(lease, &inventory(), &config).default;
    assert_eq!(of(&lease()), [pair("A", "25/8589934592!"), pair("D", "plain $5")]);
    assert_eq!(of(&time_slice()), [pair("D", "plain $5")]);
}

#[test]
fn jax_gets_its_fraction_of_memory_by_default() {
    let default = environment(&lease(), &inventory(), &Config::default()).default;
    assert_eq!(default, [("XLA_PYTHON_CLIENT_MEM_FRACTION".to_owned(), "0.056".to_owned())]);
}

/// The variables of a container that sets `own` itself, the same for the first process and for exec.
fn given(own: &[&str], lease: &Lease, config: &Config) -> Vec<String> {
    let mut process = serde_json::json!({ "env": own });
    crate::oci::edit_environment(&mut process, &environment(lease, &inventory(), config)).unwrap();
    serde_json::from_value(process["env"].take()).unwrap()
}

#[test]
fn no_framework_refuses_the_variables_of_a_container() {
    let both = |value: &str| {
        let names = ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"];
        let mut config = Config::default();
        config.grant.env = names.map(|name| (name.to_owned(), value.to_owned())).into();
        config
    };
    let configs = [Config::default(), both("${SUBLET_MEMORY_FRACTION}"), both("0.5")];
    let many = Lease { processes: 3, ..lease() };
    let two = Lease { devices: vec!["GPU-0".to_owned(), "GPU-1".to_owned()], ..time_slice() };
    let mig = Lease { devices: vec!["MIG-7".to_owned()], ..lease() };
    for lease in [lease(), time_slice(), many, two, mig] {
        for config in &configs {
            let users: [&[&str]; 4] = [
                &[],
                &["XLA_CLIENT_MEM_FRACTION=0.9"],
                &["XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"],
                &["CUDA_VISIBLE_DEVICES=3", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=99G,1=x"],
            ];
            for user in users {
                let env = given(user, &lease, config);
                assert_eq!(frameworks::refusals(&env), Vec::<String>::new(), "{env:?}");
                let own = user.iter().filter(|entry| entry.starts_with("XLA_"));
                assert!(own.into_iter().all(|entry| env.iter().any(|given| given == entry)), "{env:?}");
            }
        }
    }
    // There are names that frameworks refuse together.
    let env = ["XLA_CLIENT_MEM_FRACTION=0.1", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.1"].map(str::to_owned);
    assert_eq!(frameworks::refusals(&env).len(), 1);
}

#[test]
fn exec_gets_the_environment_of_the_first_process() {
    let lease = Lease { library_dir: Some("/usr/lib64".into()), ..lease() };
    let image = Image { library_dir: Some("/usr/lib64".into()), ..Image::default() };
    let grant = granted(&lease, &[Capability::Compute], &image, &Config::default());
    assert_eq!(grant.env, environment(&lease, &inventory(), &Config::default()));
    assert!(grant.env.default.contains(&("TRITON_LIBCUDA_PATH".to_owned(), "/usr/lib64".to_owned())));
}

#[test]
fn the_record_is_the_lease() {
    let grant = granted(&lease(), &[], &debian(), &Config::default());
    assert_eq!(grant.lease, "0123456789abcdef");
    assert!(!grant.record.contains('\n'));
    assert_eq!(serde_json::from_str::<Lease>(&grant.record).unwrap(), lease());
}
