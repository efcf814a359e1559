//! Masks and mounts over a container's MPS directories.

use std::path::Path;

use serde_json::{Value, json};

use super::rootfs::Root;
use crate::oci::check_uncovered;

fn masked(root: &Root, paths: &[&str]) -> Result<(), String> {
    let spec = json!({"linux": {"maskedPaths": paths}});
    root.inspect_with_mps(&spec).map_err(|error| error.to_string())
}

#[test]
fn a_mask_over_an_mps_directory_is_refused_and_named() {
    let root = Root::debian();
    for mask in
        ["/run/sublet", "/run", "/run/sublet/mps", "/run/./sublet/../sublet/", "/tmp/nvidia-mps", "/tmp"]
    {
        let error = masked(&root, &[mask]).unwrap_err();
        assert!(error.starts_with(mask) && error.contains("hides the MPS directory"), "{error}");
    }
    assert_eq!(
        masked(&root, &["/proc/kcore", "/sys/firmware", "/run/sublet-other", "/tmp/nvidia-mps-log"]),
        Ok(())
    );
    // The target of a process's link is unknown before there is the process.
    for mask in ["/proc/self/root/run/sublet", "/proc/1/cwd/../run", "/sys/../run/sublet"] {
        assert!(masked(&root, &[mask]).unwrap_err().contains("hides the MPS directory"), "{mask}");
    }
    let spec = json!({"linux": {"maskedPaths": ["/run/sublet"]}});
    assert!(root.inspect(&spec).is_ok(), "no server is needed");
}

#[test]
fn a_mask_by_a_link_of_the_image_is_seen_where_it_leads() {
    let root = Root::debian();
    root.dir("rootfs/run");
    root.link("/run", "rootfs/var/run");
    assert!(masked(&root, &["/var/run/sublet"]).is_err());
    root.dir("rootfs/srv/state");
    root.link("/srv/state", "rootfs/run/sublet");
    assert!(masked(&root, &["/srv/state"]).is_err());
    assert_eq!(masked(&root, &["/srv/other"]), Ok(()));
}

#[test]
fn a_mount_behind_ours_is_refused_and_one_before_is_not() {
    let root = Root::debian();
    root.dir("rootfs/run");
    root.link("/run", "rootfs/var/run");
    let look = |mounts: &[(&str, &str)]| {
        let mounts: Vec<Value> = mounts
            .iter()
            .map(|(path, source)| json!({"destination": path, "source": source, "type": "bind"}))
            .collect();
        let spec = json!({"mounts": mounts});
        check_uncovered(&spec, &root.path("rootfs"), Path::new("/run/sublet"))
            .map_err(|error| error.to_string())
    };
    let [mps, default] =
        ["/run/sublet/mps", "/tmp/nvidia-mps"].map(|path| (path, "/run/sublet/mps/GPU-1/public"));
    let volume = |path| (path, "/srv");
    let before =
        [volume("/run"), volume("/tmp"), volume("/tmp/nvidia-mps"), mps, default, volume("/usr/lib/x")];
    assert_eq!(look(&before), Ok(()));
    assert_eq!(look(&[volume("/run"), volume("/tmp/nvidia-mps")]), Ok(()), "nothing of ours");
    for behind in ["/run", "/tmp", "/run/sublet/", "/var/run/sublet", "/tmp/nvidia-mps"] {
        let error = look(&[volume("/proc"), mps, default, volume(behind)]).unwrap_err();
        assert!(error.starts_with(behind) && error.contains("remove that mount"), "{error}");
    }
}
