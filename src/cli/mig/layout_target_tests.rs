//! Layouts applied to GPUs: selectors, profile names, suggestions.

use std::path::Path;

use super::super::fake_driver::{h200, profile};
use super::*;
use sublet_core::inventory::LeftOut;
use sublet_core::place::fixture::{device, host};

fn two() -> (Vec<Gpu>, Inventory) {
    let gpus = vec![h200(), Gpu { uuid: "GPU-1".into(), index: 1, pci_device: 0x20b0_10de, ..h200() }];
    let mut devices = vec![device(0), device(1)];
    for (device, gpu) in devices.iter_mut().zip(&gpus) {
        device.uuid.clone_from(&gpu.uuid);
    }
    (gpus, host(devices))
}

fn resolve_as(name: &str, text: &str) -> Result<Vec<Target>, String> {
    let (gpus, inventory) = two();
    let layout = Layout::parse(Path::new(name), text, None).map_err(|error| error.to_string())?;
    targets(&layout, &gpus, &inventory, &Config::default()).map_err(|error| error.to_string())
}

fn resolve(text: &str) -> Result<Vec<Target>, String> {
    resolve_as("/l.toml", text)
}

fn with(instance: &str) -> String {
    resolve(&format!("[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{instance}]\n")).unwrap_err()
}

#[test]
fn a_file_of_mig_parteds_for_more_gpus_is_done_on_those_that_are_there() {
    let text = "version: v1\nmig-configs:\n  all:\n    - devices: [0, 1, 2, 3]\n      mig-enabled: true\n    - \
                devices: [4, 5, 6, 7]\n      mig-enabled: false\n";
    let found = resolve_as("/l.yaml", text).unwrap();
    assert_eq!(
        found.iter().map(|target| (&*target.gpu, target.on)).collect::<Vec<_>>(),
        [("GPU-0", true), ("GPU-1", true)]
    );
}

#[test]
fn a_gpu_that_is_left_out_is_no_fault_of_the_layouts() {
    let (mut gpus, mut inventory) = two();
    gpus.truncate(1);
    let gpu = inventory.devices.pop().unwrap();
    inventory.left_out.push(LeftOut { gpu, mig: Vec::new(), lost: true, why: String::new() });
    let text = "[[gpu]]\nmatch = \"0,1\"\nmig = true\n[[gpu]]\nmatch = \"1\"\nmig = false\n";
    let layout = Layout::parse(Path::new("/l.toml"), text, None).unwrap();
    let found = targets(&layout, &gpus, &inventory, &Config::default()).unwrap();
    assert_eq!(found.iter().map(|target| (&*target.gpu, target.on)).collect::<Vec<_>>(), [("GPU-0", true)]);
}

#[test]
fn a_left_out_gpu_is_silent_where_the_layout_means_it() {
    let (mut gpus, mut inventory) = two();
    gpus.truncate(1);
    let gpu = inventory.devices.pop().unwrap();
    inventory.left_out.push(LeftOut { gpu, mig: Vec::new(), lost: true, why: String::new() });
    let unknown = |name: &str, text: &str| {
        let layout = Layout::parse(Path::new(name), text, None).unwrap();
        let silent = silent(&layout, &gpus, &inventory, &Config::default());
        silent.iter().map(Device::label).collect::<Vec<_>>()
    };
    let toml = |matches: &str| unknown("/l.toml", &format!("[[gpu]]\nmatch = \"{matches}\"\nmig = true\n"));
    assert_eq!([toml("all"), toml("1"), toml("0,1"), toml("model:*H200*")], [["GPU 1"]; 4]);
    assert_eq!(toml("0"), [""; 0]);
    let yaml = |filter: &str| {
        let text = "version: v1\nmig-configs:\n  x:\n  - devices: all\n    device-filter: FILTER\n    mig-enabled: true\n  - \
                    devices: [1, 7]\n    device-filter: FILTER\n    mig-enabled: true\n";
        unknown("/l.yaml", &text.replace("FILTER", filter))
    };
    assert_eq!(yaml("0x233510DE"), ["GPU 1"], "once");
    assert_eq!(yaml("0x20B010DE"), [""; 0], "GPUs of this model are others");
}

#[test]
fn a_gpu_that_tells_nothing_is_passed_over_by_name() {
    let (mut gpus, inventory) = two();
    gpus.truncate(1);
    let passed_over = |matches: &str| {
        let text = format!("[[gpu]]\nmatch = \"{matches}\"\nmig = true\n");
        let layout = Layout::parse(Path::new("/l.toml"), &text, None).unwrap();
        assert_eq!(targets(&layout, &gpus, &inventory, &Config::default()).unwrap().len(), 1, "{matches}");
        let silent = silent(&layout, &gpus, &inventory, &Config::default());
        silent.iter().map(Device::label).collect::<Vec<_>>()
    };
    assert_eq!([passed_over("all"), passed_over("model:*H200*")], [["GPU 1"]; 2]);
    assert_eq!(passed_over("0"), [""; 0], "it is not meant");
}

#[test]
fn profiles_and_counts_become_wants() {
    let text = "[[gpu]]\nmatch = \"1\"\nmig = true\ninstances = [{ profile = \"2g.35gb\", count = 2 }, { profile = \
                \"4g.71gb\", start = 0, compute = [\"2c\", \"1c.4g.71gb\", \"1c\"] }]\n";
    let found = resolve(text).unwrap();
    let whole = Want { profile: profile("2g.35gb"), start: None, compute: vec![2] };
    let cut = Want { profile: profile("4g.71gb"), start: Some(0), compute: vec![1, 1, 2] };
    assert_eq!(found, [Target { gpu: "GPU-1".into(), on: true, want: vec![whole.clone(), whole, cut] }]);
    let none = resolve(
        "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"2g.35gb\", compute = [] }]\n",
    );
    assert_eq!(none.unwrap()[0].want[0].compute, Vec::<u32>::new());
}

#[test]
fn each_gpu_once_and_only_those_that_are_here() {
    assert_eq!(
        resolve("[[gpu]]\nmatch = \"0\"\nmig = true\n[[gpu]]\nmatch = \"all\"\nmig = false\n").unwrap_err(),
        "layout /l.toml:4: GPU 0 is already named in line 1: name each GPU once"
    );
    assert_eq!(
        resolve("[[gpu]]\nmatch = \"0,0\"\nmig = true\n").unwrap_err(),
        "layout /l.toml:1: GPU 0 is named twice"
    );
    assert_eq!(
        resolve("[[gpu]]\nmatch = \"7\"\nmig = true\n").unwrap_err(),
        "layout /l.toml:1: no GPU of this host is 7; it has GPU 0 (GPU-0), GPU 1 (GPU-1)"
    );
    assert_eq!(resolve("[[gpu]]\nmatch = \"model:*A30*\"\nmig = true\n").unwrap(), []);
}

#[test]
fn spellings_of_other_tools_get_a_hint() {
    let has = "(it has 7g.141gb, 4g.71gb, 3g.71gb, 2g.35gb, 1g.35gb, 1g.18gb, 1g.18gb+me)";
    for spelt in ["1g.18GB", "MIG 1g.18gb", "1g.18g"] {
        assert_eq!(
            with(&format!("{{ profile = \"{spelt}\" }}")),
            format!(
                "layout /l.toml:4: GPU 0 (NVIDIA H200) has no profile {spelt}; did you mean 1g.18gb? {has}"
            )
        );
    }
    assert_eq!(
        with("{ profile = \"1c.2g.35gb\" }"),
        format!(
            "layout /l.toml:4: GPU 0 (NVIDIA H200) has no profile 1c.2g.35gb; write profile = \"2g.35gb\", compute \
             = [\"1c\"] {has}"
        )
    );
    assert_eq!(
        with("{ profile = \"2g.35gb\", compute = [\"3c\"] }"),
        "layout /l.toml:4: a 2g.35gb cannot have a compute instance 3c: it can have 1c.2g.35gb, 2g.35gb"
    );
}

#[test]
fn a_device_filter_leaves_out_other_models() {
    let text = "version: v1\nmig-configs:\n  x:\n  - devices: all\n    device-filter: 0x20B010DE\n    \
                mig-enabled: true\n    mig-devices: {1g.18gb: 7}\n";
    let found = resolve_as("/l.yaml", text).unwrap();
    assert_eq!(found.iter().map(|target| target.gpu.as_str()).collect::<Vec<_>>(), ["GPU-1"]);
    assert_eq!(found[0].want.len(), 7);
}
