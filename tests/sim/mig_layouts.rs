//! MIG layouts on the simulated driver through NVML: thousands of changes while some MIG devices have leases.
//! Skipped, with a message, if the simulator is not built or the user is not root.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sublet::mig::{self, Driver as _, Gpu, Nvml, Target, Want};
use sublet_core::config::Config;
use sublet_core::ledger::{Container, Lease, LeaseId, LeaseState, Ledger};
use sublet_core::process::Process;
use sublet_core::share::{Isolation, Mode, Priority, Suspend};

/// The simulated driver, ended when dropped.
struct Host {
    root: PathBuf,
    config: Config,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = Command::new(built("sublet-sim")).args(["down", "--root"]).arg(&self.root).status();
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn built(program: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_sublet")).with_file_name(program)
}

impl Host {
    fn up(topology: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() || !built("sublet-sim").exists() {
            eprintln!("SKIPPED: needs root and the simulator (cargo build --workspace)");
            return None;
        }
        let root = PathBuf::from(format!("/tmp/sublet-mig-{}-{topology}", std::process::id()));
        let topology = format!("{}/../../tests/sim/topologies/{topology}.toml", env!("CARGO_MANIFEST_DIR"));
        let mut up = Command::new(built("sublet-sim"));
        up.args(["up", "--topology", &topology, "--root"]).arg(&root).stdout(Stdio::null());
        assert!(up.status().unwrap().success());
        let mut config = Config { state_dir: root.join("run"), ..Config::default() };
        config.driver.root.clone_from(&root);
        let library = format!("usr/lib/{}-linux-gnu/libnvidia-ml.so.1", std::env::consts::ARCH);
        config.driver.nvml = Some(root.join(library));
        Some(Self { root, config })
    }
}

/// `SplitMix64`: the same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % limit as u64).unwrap()
    }
}

/// Random instances that fit together, whole or divided into compute instances.
fn some_layout(gpu: &Gpu, random: &mut Random) -> Target {
    let (mut want, mut taken) = (Vec::<Want>::new(), Vec::<mig::Span>::new());
    for _ in 0..random.below(9) {
        let profile = &gpu.profiles[random.below(gpu.profiles.len())];
        let span = profile.placements[random.below(profile.placements.len())];
        let same = want.iter().filter(|one| one.profile == profile.id).count();
        // A GPU has one optical flow accelerator, which only one instance can have.
        let media = |one: &Want| gpu.profile(one.profile).is_some_and(|profile| profile.media[1] > 0);
        let second = profile.media[1] > 0 && want.iter().any(media);
        let overlaps = taken.iter().any(|other| other.overlaps(span));
        if overlaps || second || same >= profile.instances as usize {
            continue;
        }
        taken.push(span);
        let cut = random.below(3) == 0 && profile.slices > 1;
        let compute = if cut { vec![1; profile.slices as usize] } else { vec![profile.slices] };
        want.push(Want { profile: profile.id, start: None, compute });
    }
    Target { gpu: gpu.uuid.clone(), on: true, want }
}

/// Leases on some MIG devices; their UUIDs.
fn hold(gpu: &Gpu, ledger: &mut Ledger, random: &mut Random) -> BTreeSet<String> {
    let parts = gpu.instances.iter().flat_map(|one| &one.compute);
    let held: BTreeSet<String> =
        parts.filter(|_| random.below(5) == 0).map(|part| part.uuid.clone()).collect();
    ledger.leases = held.iter().map(|uuid| lease(uuid)).collect();
    held
}

fn lease(device: &str) -> Lease {
    let nowhere = || PathBuf::from("/nowhere");
    Lease {
        id: LeaseId::parse("00000000000000aa").unwrap(),
        container: Container {
            uid: 0,
            id: "held".into(),
            bundle: nowhere(),
            rootfs: nowhere(),
            record: nowhere(),
        },
        devices: vec![device.to_owned()],
        mode: Mode::Mig,
        isolation: Isolation::Shared,
        daemon: None,
        sm: None,
        memory_bytes: None,
        processes: 1,
        priority: Priority::Normal,
        guard: None,
        suspend: Suspend::Never,
        suspension: None,
        known: Vec::new(),
        resumed_ms: None,
        backoff: None,
        state: LeaseState::Active,
        owner: Process::current().unwrap(),
        init: None,
        bind_by: None,
        since: 0,
        library_dir: None,
        mount_points: Vec::new().into(),
        volumes: Vec::new(),
        brokered: false,
        job: None,
        within: None,
        claimed_owner: None,
        mig_devices: Vec::new(),
    }
}

/// Profiles and their compute instances, without the placements.
fn content(gpu: &Gpu) -> Vec<(u32, Vec<u32>)> {
    let cut = |one: &mig::Instance| {
        let mut cut: Vec<u32> = one.compute.iter().map(|part| part.slices).collect();
        cut.sort_unstable();
        (one.profile, cut)
    };
    let mut content: Vec<_> = gpu.instances.iter().map(cut).collect();
    content.sort_unstable();
    content
}

/// Changes from layout to layout. Returns how many changes were made, and how many were refused because of leases.
fn walk(topology: &str, changes: usize) -> Option<(usize, usize)> {
    let host = Host::up(topology)?;
    let inventory = sublet::probe::probe(&host.config).unwrap();
    let uuid = inventory.devices[0].uuid.clone();
    let mut driver = Nvml::open(&host.config, &inventory).unwrap();
    let (mut random, mut ledger) = (Random(1), Ledger::empty("boot"));
    let (mut made, mut refused) = (0, 0);
    while made < changes {
        let mut gpu = driver.gpu(&uuid).unwrap();
        let target = some_layout(&gpu, &mut random);
        let held = hold(&gpu, &mut ledger, &mut random);
        gpu.mark(&ledger);
        let plan = match mig::plan(&gpu, &target) {
            Ok(plan) => plan,
            Err(obstacle) => {
                assert!(!held.is_empty(), "{obstacle}");
                refused += 1;
                continue;
            }
        };
        mig::apply(&[plan], false, &mut driver).unwrap();
        let now = driver.gpu(&uuid).unwrap();
        let mut wanted: Vec<_> = target.want.iter().map(|one| (one.profile, one.compute.clone())).collect();
        wanted.sort_unstable();
        assert_eq!(content(&now), wanted);
        let parts = now.instances.iter().flat_map(|one| &one.compute);
        let uuids: BTreeSet<String> = parts.map(|part| part.uuid.clone()).collect();
        assert!(held.is_subset(&uuids), "a held MIG device was made again");
        assert_eq!(mig::plan(&now, &target).unwrap().steps, []);
        made += 1;
    }
    Some((made, refused))
}

#[test]
fn thousands_of_layouts_one_after_another_around_what_is_held() {
    let Some((made, refused)) = walk("h200-mig", 2000) else { return };
    assert!(made == 2000 && refused > 100, "{made} {refused}");
}

#[test]
fn parts_with_four_slices_and_with_more_profiles_too() {
    for topology in ["a30-mig", "a100x2-mig", "b200"] {
        let Some((made, _)) = walk(topology, 100) else { return };
        assert_eq!(made, 100, "{topology}");
    }
}
