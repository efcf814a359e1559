//! For the fuzz targets: layout files applied to GPUs in memory.

use std::path::Path;

use super::fake_driver::{Double, h200};
use super::{Gpu, Layout, Target, apply, export, plan, targets};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::place::fixture::{device, host};

/// Two H200 in MIG mode, the second with another PCI id.
fn two() -> (Vec<Gpu>, Inventory) {
    let uuid = |index: u32| format!("GPU-8d2e5f1a-0b3c-4d5e-8f90-00000000000{index}");
    let gpus = vec![
        Gpu { uuid: uuid(0), ..h200() },
        Gpu { uuid: uuid(1), index: 1, pci_device: 0x20b0_10de, ..h200() },
    ];
    (gpus, host([0, 1].map(|index| Device { uuid: uuid(index), ..device(index) }).to_vec()))
}

/// The targets of the layout file `name` with this `text`.
fn wanted(name: &str, text: &str, chosen: Option<&str>, gpus: &[Gpu]) -> Result<Vec<Target>, String> {
    let layout = Layout::parse(Path::new(name), text, chosen).map_err(|error| error.to_string())?;
    targets(&layout, gpus, &two().1, &Config::default()).map_err(|error| error.to_string())
}

/// Reads a layout, divides empty GPUs accordingly and exports them. The GPUs must match the exported layout.
///
/// # Errors
/// The error in the layout, or why it does not fit the GPUs.
///
/// # Panics
/// A plan cannot be carried out, or the export describes something else.
pub fn layout(name: &str, text: &str, chosen: Option<&str>) -> Result<(), String> {
    let (gpus, _) = two();
    let mut plans = Vec::new();
    for target in wanted(name, text, chosen, &gpus)? {
        let gpu = gpus.iter().find(|gpu| gpu.uuid == target.gpu).ok_or("no such GPU")?;
        plans.push(plan(gpu, &target).map_err(|obstacle| obstacle.to_string())?);
    }
    let mut driver = Double::new(gpus);
    if let Err(error) = apply(&plans, false, &mut driver) {
        panic!("{error}: {plans:?}");
    }
    let exported = export(&driver.gpus);
    match wanted("/exported.toml", &exported, None, &driver.gpus) {
        Err(error) => panic!("{error}: {exported}"),
        Ok(targets) => {
            for target in targets {
                let gpu =
                    driver.gpus.iter().find(|gpu| gpu.uuid == target.gpu).expect("it exported this one");
                let again = plan(gpu, &target).map_err(|obstacle| obstacle.to_string());
                assert_eq!(again.map(|plan| plan.steps), Ok(Vec::new()), "{exported}");
            }
        }
    }
    Ok(())
}
