//! The simulated nvidia-smi's output about MIG, word for word as of a real H200 (docs/evidence), or as published by
//! NVIDIA.

use crate::driver::{Driver, root_or_skip};

/// The output of a real H200, driver 580.
#[test]
fn an_h200_with_mig_off_lists_what_the_real_one_lists() {
    let driver = Driver::up("h200");
    let evidence = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/evidence/2026-11-21-h200-mig-off.md");
    let evidence = std::fs::read_to_string(evidence).unwrap();
    for task in ["-lgip", "-lgipp"] {
        let real = evidence.split(&format!("$ nvidia-smi mig {task}\n")).nth(1).unwrap();
        let real = real.split("```").next().unwrap();
        assert_eq!(driver.said(&format!("mig {task}")), real, "{task}");
    }
    for task in ["-lgi", "-lci", "-lcip"] {
        assert_eq!(driver.said(&format!("mig {task}")), "No MIG-enabled devices found.\n", "{task}");
    }
    let gone = driver.smi("mig -lgi -i 7");
    assert_eq!((gone.stdout, gone.status.code()), (b"No devices were found\n".to_vec(), Some(6)));
    let listed = driver.said("-L");
    assert_eq!(listed, "GPU 0: NVIDIA H200 (UUID: GPU-5b1e7000-0000-4000-8000-000000000100)\n");
}

/// The tables and sentences as published for A100s.
#[test]
fn nvidia_smi_lists_the_worked_example() {
    if !root_or_skip("lists of MIG instances") {
        return;
    }
    let driver = Driver::up("a100x2-mig");
    let lgi = "\
+---------------------------------------------------------+
| GPU instances:                                          |
| GPU   Name               Profile  Instance   Placement  |
|                            ID       ID       Start:Size |
|=========================================================|
|   0  MIG 1g.5gb            19        9          6:1     |
+---------------------------------------------------------+
|   0  MIG 2g.10gb           14        3          4:2     |
+---------------------------------------------------------+
|   0  MIG 4g.20gb            5        2          0:4     |
+---------------------------------------------------------+
";
    assert_eq!(driver.said("mig -lgi"), lgi);
    let lci = "\
+--------------------------------------------------------------------+
| Compute instances:                                                 |
| GPU     GPU       Name             Profile   Instance   Placement  |
|       Instance                       ID        ID       Start:Size |
|         ID                                                         |
|====================================================================|
|   0      3       MIG 1c.2g.10gb       0         0          0:1     |
+--------------------------------------------------------------------+
|   0      3       MIG 1c.2g.10gb       0         1          1:1     |
+--------------------------------------------------------------------+
";
    assert_eq!(driver.said("mig -lci -gi 3"), lci);
    let lcip = "\
+--------------------------------------------------------------------------------------+
| Compute instance profiles:                                                           |
| GPU     GPU       Name             Profile  Instances   Exclusive       Shared       |
|       Instance                       ID     Free/Total     SM       DEC   ENC   OFA  |
|         ID                                                          CE    JPEG       |
|======================================================================================|
|   0      3       MIG 1c.2g.10gb       0      0/2           14        1     0     0   |
|                                                                      2     0         |
+--------------------------------------------------------------------------------------+
|   0      3       MIG 2g.10gb          1*     0/1           28        1     0     0   |
|                                                                      2     0         |
+--------------------------------------------------------------------------------------+
";
    assert_eq!(driver.said("mig -lcip -gi 3"), lcip);
    let listed = driver.said("-L");
    let line = "  MIG 1g.5gb      Device  3: (UUID: MIG-5b1e7000-0000-5000-8000-000000000a04)\n";
    assert!(listed.contains(line), "{listed}");
    let full = driver.smi("mig -cgi 3g.20gb");
    assert_eq!(
        String::from_utf8(full.stdout).unwrap(),
        "Unable to create a GPU instance on GPU  0 using profile 9: Insufficient Resources\n\
         Failed to create GPU instances: Insufficient Resources\n"
    );
    driver.said("mig -dci -gi 9");
    driver.said("mig -dgi -gi 9");
    assert_eq!(
        driver.said("mig -cgi 1g.5gb+me:6 -C"),
        "Successfully created GPU instance ID  9 on GPU  0 using profile MIG 1g.5gb+me (ID 20)\n\
         Successfully created compute instance ID  0 on GPU  0 GPU instance ID  9 \
         using profile MIG 1g.5gb+me (ID  0)\n"
    );
}
