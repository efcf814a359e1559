//! Tests of the cache: when an inventory is up to date and when it is not.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use super::super::fixture::Root;
use super::super::{Driver, DriverFile, FileKind, Majors};
use super::*;
use crate::place::fixture::device;
use crate::share::Capability;

const GPU: &str = "0000:3b:00.0";
const ACCESS: &str = "/proc/driver/nvidia/capabilities/gpu0/mig/gi2/ci0/access";
const LIBCUDA: &str = "/usr/lib64/libcuda.so.580.159.04";

/// A root with one GPU, one MIG instance and one driver file, and its inventory stored.
fn stored() -> (Root, Config) {
    let root = Root::with_driver("580.159.04");
    root.gpu(GPU, [0xde, 0x10]).file(ACCESS, "DeviceFileMinor: 21").file(LIBCUDA, "");
    let config = root.config();
    store(&config, &inventory(&config), SystemTime::now()).unwrap();
    (root, config)
}

fn inventory(config: &Config) -> Inventory {
    Inventory {
        schema: SCHEMA.into(),
        fingerprint: fingerprint(config).unwrap(),
        probed_at: 1_795_251_600,
        mig_changes: 0,
        driver: Driver {
            version: "580.159.04".into(),
            cuda: (13, 0),
            simulated: true,
            mps_control: None,
            mps_missing: None,
            smi: None,
            majors: Majors { nvidia: Some(195), uvm: Some(510), caps: Some(241) },
            mig_caps: [None, None],
        },
        devices: Vec::new(),
        left_out: Vec::new(),
        links: Vec::new(),
        directories: Vec::new(),
        files: vec![DriverFile {
            source: crate::fs::under(&config.driver.root, LIBCUDA),
            kind: FileKind::Library { soname: "libcuda.so.1".into(), also: vec!["libcuda.so".into()] },
            capability: Capability::Compute,
            needs: None,
        }],
    }
}

fn stale(config: &Config) -> String {
    match load(config).unwrap_err() {
        InventoryError::Stale { changed, .. } => changed,
        other => panic!("{other}"),
    }
}

fn rewrite(config: &Config, change: impl FnOnce(&mut Inventory)) {
    let mut inventory = inventory(config);
    change(&mut inventory);
    store(config, &inventory, SystemTime::now()).unwrap();
}

#[test]
fn a_stored_inventory_is_loaded() {
    let (_root, config) = stored();
    assert_eq!(load(&config).unwrap(), inventory(&config));
    let mode = fs::metadata(config.state_dir.join("inventory.json")).unwrap().mode();
    assert_eq!(mode & 0o7777, 0o644);
    // criu's file has one option, which criu does not know.
    let criu = fs::read_to_string(no_checkpoint(&config.state_dir)).unwrap();
    let options: Vec<_> = criu.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(options, ["a-container-with-a-GPU-share-cannot-be-checkpointed"]);
    assert_eq!(fs::metadata(&config.state_dir).unwrap().mode() & 0o7777 & !0o755, 0);
}

#[test]
fn nothing_stored_is_missing() {
    let root = Root::with_driver("580.159.04");
    let error = load(&root.config()).unwrap_err();
    assert!(matches!(error, InventoryError::Missing { .. }) && error.wants_refresh(), "{error}");
}

#[test]
fn stale_after_a_reboot() {
    let (_root, config) = stored();
    rewrite(&config, |inventory| inventory.fingerprint.boot_id = "another".into());
    assert_eq!(stale(&config), "it was written in an earlier boot");
}

#[test]
fn stale_when_the_module_was_reloaded_in_another_version() {
    let (root, config) = stored();
    root.file(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.44.01  x\n",
    );
    assert_eq!(stale(&config), "the driver was 580.159.04, and is 590.44.01 now");
}

#[test]
fn stale_once_both_mps_programs_are_installed() {
    let (root, config) = stored();
    root.program("/usr/bin/nvidia-cuda-mps-control");
    load(&config).unwrap();
    root.program("/usr/sbin/nvidia-cuda-mps-server");
    assert_eq!(stale(&config), "the driver's MPS programs have been installed since");
    rewrite(&config, |inventory| {
        inventory.driver.mps_control = Some("/usr/bin/nvidia-cuda-mps-control".into());
    });
    load(&config).unwrap();
}

#[test]
fn stale_when_a_gpu_came_or_went() {
    let (root, config) = stored();
    root.gpu("0000:5e:00.0", [0xde, 0x10]);
    assert_eq!(stale(&config), "the GPUs were 0000:3b:00.0, and are 0000:3b:00.0 0000:5e:00.0 now");
    fs::remove_dir_all(root.path().join("proc/driver/nvidia/gpus")).unwrap();
    assert_eq!(stale(&config), "the GPUs were 0000:3b:00.0, and are none now");
}

#[test]
fn stale_when_a_mig_instance_came_or_went() {
    let (root, config) = stored();
    root.file("/proc/driver/nvidia/capabilities/gpu0/mig/gi2/ci1/access", "DeviceFileMinor: 22");
    assert_eq!(stale(&config), "the MIG instances were gpu0/gi2/ci0, and are gpu0/gi2/ci0 gpu0/gi2/ci1 now");
    fs::remove_dir_all(root.path().join("proc/driver/nvidia/capabilities/gpu0/mig/gi2")).unwrap();
    assert_eq!(stale(&config), "the MIG instances were gpu0/gi2/ci0, and are none now");
}

#[test]
fn instances_of_a_gpu_whose_layout_changes_may_come_and_go() {
    let (root, config) = stored();
    rewrite(&config, |inventory| inventory.devices = vec![device(0), device(1)]);
    root.file("/proc/driver/nvidia/capabilities/gpu0/mig/gi3/ci0/access", "DeviceFileMinor: 30");
    let beside = |gpu: &str| load_beside(&config, &[gpu.to_owned()]);
    assert!(load(&config).is_err() && beside("GPU-1").is_err() && beside("GPU-7").is_err());
    assert!(beside("GPU-0").is_ok());
    root.gpu("0000:5e:00.0", [0xde, 0x10]);
    assert!(beside("GPU-0").is_err(), "another change counts all the same");
}

#[test]
fn stale_when_an_upgrade_took_a_driver_file_away() {
    let (root, mut config) = stored();
    fs::remove_file(root.path().join("usr/lib64/libcuda.so.580.159.04")).unwrap();
    assert!(stale(&config).ends_with("usr/lib64/libcuda.so.580.159.04 is missing"));
    config.driver.inject = Inject::None;
    assert!(load(&config).is_ok());
}

#[test]
fn a_gpu_that_falls_off_the_bus_is_named_and_left_out_by_the_next_refresh() {
    let (root, config) = stored();
    root.gpu(GPU, [0xff, 0xff]);
    let error = load(&config).unwrap_err();
    assert!(matches!(&error, InventoryError::FellOffTheBus { bus_id } if bus_id == GPU), "{error}");
    assert!(error.to_string().starts_with("GPU 0000:3b:00.0 fell off the bus"), "{error}");
    rewrite(&config, |_| ());
    assert_eq!(load(&config).unwrap().fingerprint.gpus, Vec::<String>::new());
}

#[test]
fn an_unloaded_driver_is_no_reason_to_refresh() {
    let (root, config) = stored();
    fs::remove_file(root.path().join("proc/driver/nvidia/version")).unwrap();
    let error = load(&config).unwrap_err();
    assert!(matches!(error, InventoryError::NoDriver { .. }) && !error.wants_refresh(), "{error}");
}

#[test]
fn garbage_is_corrupt_and_healed_by_storing() {
    let (_root, config) = stored();
    let path = config.state_dir.join("inventory.json");
    let whole = fs::read(&path).unwrap();
    let cut = &whole[..whole.len() / 2];
    for garbage in [&b""[..], b"{}", b"[", b"null", b"\xff\xfe\0", cut] {
        fs::write(&path, garbage).unwrap();
        let error = load(&config).unwrap_err();
        assert!(matches!(error, InventoryError::Corrupt { .. }) && error.wants_refresh(), "{error}");
    }
    store(&config, &inventory(&config), SystemTime::now()).unwrap();
    assert!(load(&config).is_ok());
}

#[test]
fn another_schema_is_corrupt() {
    let (_root, config) = stored();
    rewrite(&config, |inventory| inventory.schema = "sublet.inventory/2\n".into());
    let error = load(&config).unwrap_err().to_string();
    assert!(error.contains("schema sublet.inventory/2\\n, not sublet.inventory/1"), "{error}");
}

#[test]
fn nesting_and_size_are_bounded() {
    let (_root, config) = stored();
    let path = config.state_dir.join("inventory.json");
    fs::write(&path, "[".repeat(100_000)).unwrap();
    assert!(matches!(load(&config).unwrap_err(), InventoryError::Corrupt { .. }));
    fs::write(&path, vec![b' '; (8 << 20) + 1]).unwrap();
    assert!(load(&config).unwrap_err().to_string().contains("it has 8388609 bytes"));
}

#[test]
fn a_link_is_not_followed_and_replaced_by_storing() {
    let (root, config) = stored();
    let path = config.state_dir.join("inventory.json");
    let elsewhere = root.path().join("elsewhere.json");
    fs::rename(&path, &elsewhere).unwrap();
    symlink(&elsewhere, &path).unwrap();
    let before = fs::read(&elsewhere).unwrap();
    let error = load(&config).unwrap_err().to_string();
    assert!(error.contains("it is not a regular file"), "{error}");
    store(&config, &inventory(&config), SystemTime::now()).unwrap();
    assert!(load(&config).is_ok());
    assert!(fs::symlink_metadata(&path).unwrap().is_file());
    assert_eq!(fs::read(&elsewhere).unwrap(), before);
}

#[test]
fn a_file_that_everyone_may_write_is_not_believed() {
    let (_root, config) = stored();
    let path = config.state_dir.join("inventory.json");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let error = load(&config).unwrap_err().to_string();
    assert!(error.contains("others than its owner may write to it (mode "), "{error}");
    store(&config, &inventory(&config), SystemTime::now()).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o644);
}

#[test]
fn a_fifo_or_directory_is_refused_without_waiting() {
    let (_root, config) = stored();
    let path = config.state_dir.join("inventory.json");
    fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    assert!(load(&config).unwrap_err().to_string().contains("it is not a regular file"));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(load(&config).unwrap_err().to_string().contains("it is not a regular file"));
    let stored = store(&config, &inventory(&config), SystemTime::now());
    assert!(matches!(stored, Err(InventoryError::Unwritable { .. })));
}

#[test]
fn a_stored_inventory_has_the_time_of_its_probe() {
    let (_root, config) = stored();
    let began = UNIX_EPOCH + Duration::from_secs(1_795_251_600);
    store(&config, &inventory(&config), began).unwrap();
    assert_eq!(fs::metadata(path(&config)).unwrap().modified().unwrap(), began);
}

#[test]
fn a_file_of_another_user_is_not_believed() {
    let (_root, config) = stored();
    let path = config.state_dir.join("inventory.json");
    // Only root can give a file away; as another user the owner check cannot be provoked.
    if std::os::unix::fs::chown(&path, Some(65534), None).is_ok() {
        assert!(load(&config).unwrap_err().to_string().contains("it belongs to uid 65534"));
        store(&config, &inventory(&config), SystemTime::now()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().uid(), 0);
    }
}

#[test]
fn stored_inventories_are_read_and_written_again_alike() {
    for stored in [
        include_str!("../../../tests/formats/gpus/inventory.json"),
        include_str!("../../../tests/formats/mig/inventory.json"),
    ] {
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: Inventory = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }
}

#[test]
fn a_word_holds_for_this_boot_and_a_few_seconds() {
    assert!(is_recent("boot 100\n", "boot", 100) && is_recent("boot 100\n", "boot", 105));
    for (text, now) in [("boot 100", 106), ("boot 100", 99), ("other 100", 100), ("boot x", 100), ("", 0)] {
        assert!(!is_recent(text, "boot", now), "{text}");
    }
    assert!(!is_recent(" 100", "", 100));
}
