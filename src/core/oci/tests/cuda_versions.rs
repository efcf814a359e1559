//! Images with a libcuda of their own, and images that need a newer CUDA than the driver has.

use serde_json::json;

use super::rootfs::{Root, TRIPLET, inspect_in, inventory, time_slice};
use crate::config::Config;
use crate::inventory::{Driver, Inventory};

#[test]
fn rival_libraries_are_named_once() {
    let root = Root::debian();
    root.file("rootfs/usr/local/cuda/compat/libcuda.so.1.1", "x");
    root.link("libcuda.so.1.1", "rootfs/usr/local/cuda/compat/libcuda.so.1");
    root.file("rootfs/opt/fwd/libcuda.so.1", "x");
    root.file(&format!("rootfs/usr/lib/{TRIPLET}/libcuda.so.1"), "");
    let cache = format!(
        "glibc-ld.so.cache1.1\0\x01\x02\0libcuda.so.1\0/usr/local/cuda/compat/libcuda.so.1\0\
         /usr/lib/{TRIPLET}/libcuda.so.1\0/gone/libcuda.so.1\0/opt/fwd/libcuda.so.1\0"
    );
    root.file("rootfs/etc/ld.so.cache", cache);
    let path = format!("LD_LIBRARY_PATH=relative::/opt/fwd/:/lib/{TRIPLET};/missing");
    let warnings = root.inspect(&json!({"process": {"env": [path]}})).unwrap().warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with(
        "the image's own /opt/fwd/libcuda.so.1 (libcuda.so.1, found by its LD_LIBRARY_PATH) is used instead"
    ));
    assert!(warnings[1].starts_with(
        "the image's own /usr/local/cuda/compat/libcuda.so.1 (libcuda.so.1.1, found by its /etc/ld.so.cache)"
    ));
}

#[test]
fn a_huge_cache_is_read_to_its_bound() {
    let root = Root::debian();
    root.file("rootfs/opt/libcuda.so.1", "x");
    let mut cache = vec![0; 4 << 20];
    cache.extend_from_slice(b"\0/opt/libcuda.so.1\0");
    root.file("rootfs/etc/ld.so.cache", &cache);
    assert_eq!(root.inspect(&json!({})).unwrap().warnings, Vec::<String>::new());
    root.file("rootfs/etc/ld.so.cache", &cache[1024..]);
    assert_eq!(root.inspect(&json!({})).unwrap().warnings.len(), 1);
}

#[test]
fn the_cuda_that_an_image_needs_is_compared_with_the_drivers() {
    let driver = Driver { version: "550.54.14".into(), cuda: (12, 4), ..inventory().driver };
    let on = |driver: Driver, root: &Root, env: &[&str]| {
        let inventory = Inventory { driver, ..inventory() };
        let spec = json!({"process": {"env": env}});
        inspect_in(&root.path("rootfs"), &spec, &time_slice(), &inventory, &Config::default())
            .unwrap()
            .warnings
    };
    let warned = |root: &Root, env: &[&str]| on(driver.clone(), root, env);
    let old = "the image needs CUDA 13.0 (its NVIDIA_REQUIRE_CUDA), and the host's driver 550.54.14 has CUDA 12.4: ";
    let root = Root::debian();
    let one = |warnings: Vec<String>| match <[String; 1]>::try_from(warnings) {
        Ok([line]) => line,
        Err(several) => panic!("{several:?}"),
    };
    let needs = "NVIDIA_REQUIRE_CUDA=cuda>=13.0 brand=tesla,driver>=535,driver<536";
    assert_eq!(one(warned(&root, &[needs])), format!("{old}use an image for CUDA 12.4 or a newer driver"));
    // NVML does not tell the version.
    let untold = Driver { cuda: (0, 0), ..driver.clone() };
    assert_eq!(on(untold, &root, &[needs]), Vec::<String>::new());
    for enough in
        ["", "cuda>=12.4", "cuda>=12.0,cuda>=11 cuda>=13.0", "cuda<14", "cuda>=x.y", "cuda>=99999999999.0"]
    {
        assert_eq!(
            warned(&root, &[&format!("NVIDIA_REQUIRE_CUDA={enough}")]),
            Vec::<String>::new(),
            "{enough}"
        );
    }
    root.file("rootfs/usr/local/cuda/compat/libcuda.so.580.65.06", "x");
    root.link("libcuda.so.580.65.06", "rootfs/usr/local/cuda/compat/libcuda.so.1");
    let help = "can use its own newer libcuda with `-e LD_LIBRARY_PATH=/usr/local/cuda/compat`";
    assert!(one(warned(&root, &[needs])).ends_with(help));
    let used = one(warned(&root, &[needs, "LD_LIBRARY_PATH=/usr/local/cuda/compat"]));
    let newer = "it uses its own /usr/local/cuda/compat/libcuda.so.1 (libcuda.so.580.65.06, found by its LD_LIBRARY_PATH)";
    assert!(used.starts_with(&format!("{old}{newer}")), "{used}");
}
