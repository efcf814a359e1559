//! MIG devices with Docker: requests, device nodes, and instances that are destroyed or created again.

use super::frame::Expect::{Fails, Refused, Share, Works};
use super::frame::{Case, Share as Of, case};

/// The SMs of the 4g.20gb.
pub const QUARTER: Of =
    Of { sm: 14, gib: Some(4), nodes: "nodes: nvidia-caps nvidia-uvm nvidia-uvm-tools nvidia0 nvidiactl" };

pub fn cases() -> Vec<Case> {
    [which(), several(), shares(), capabilities(), instances(), cdi(), around()]
        .into_iter()
        .flatten()
        .collect()
}

/// Requests for a certain MIG device.
fn which() -> Vec<Case> {
    vec![
        case(
            "the GPU in MIG mode, by its UUID",
            "up $(of gpu=GPU-5b1e7000-0000-4000-8000-000000000a00)",
            Refused("is in MIG mode"),
        ),
        case(
            "the GPU in MIG mode, by its number, whole",
            "up $(of gpu=0 mode=exclusive)",
            Refused("is in MIG mode"),
        ),
        case("a profile that no GPU has", "up $(of mig=9g.999gb)", Refused("9g.999gb")),
        case(
            "a profile on a GPU without MIG mode",
            "up $(of mig=1g.5gb gpu=1)",
            Refused("no MIG device of this host is on the GPU number 1"),
        ),
        case(
            "a number that 64 bits do not hold",
            "up $(of gpu=0:99999999999999999999)",
            Refused("sublet.gpu"),
        ),
        case(
            "a UUID of no device",
            "up $(of gpu=MIG-00000000-0000-5000-8000-000000000a04)",
            Refused("MIG-00000000"),
        ),
        case("exclusive, which is for GPUs", "up $(of gpu=0:3 mode=exclusive)", Refused("exclusive")),
    ]
}

/// Several devices in one request.
fn several() -> Vec<Case> {
    vec![
        case("the same twice", "up $(of gpu=0:3,0:3)", Refused("0:3")),
        case(
            "two, of which one has a neighbour: all or none",
            "up $(of gpu=0:3,0:0 mode=mig); r=$?; [ $(leases) = 1 ] && exit $r",
            Refused("0:0"),
        ),
        case("more than there are", "up $(of gpu=any:9 mode=mig)", Refused("9")),
    ]
}

/// The bookings of the devices.
fn shares() -> Vec<Case> {
    vec![
        case(
            "the whole device beside the neighbour's share",
            "up $(of gpu=0:0 mode=mig)",
            Refused("MIG device 0:0"),
        ),
        case(
            "more memory than is left on it",
            "up $(of gpu=0:0 sm=25 memory=18GiB)",
            Refused("MIG device 0:0"),
        ),
        case("too few SMs to start a context on it", "up $(of gpu=0:3 sm=1)", Refused("too few SMs")),
        case(
            "a share of one that is taken whole",
            "NAME=first ask $(of mig=1g.5gb) probe sleep 60; up $(of gpu=0:3 sm=50)",
            Fails("MIG device 0:3 is taken whole"),
        ),
        // MPS gives every client at least 8 SMs (docs/evidence).
        case(
            "MPS on a part: the other part is another's",
            "NAME=first ask $(of gpu=0:1) probe sleep 60; sees $(of gpu=0:2 sm=50) 2>/dev/null",
            Works("nvidia-cap30 nvidia-cap32 with 1 device of 8 SMs, MPS true"),
        ),
        case(
            "five at once for the only one",
            "for i in 1 2 3 4 5; do docker run -d --name job$i --network none --runtime sublet $(of mig=1g.5gb) probe sleep 60 >/dev/null 2>&1 & done; wait; leases",
            Works("2"),
        ),
    ]
}

/// The device nodes that give access to instances.
fn capabilities() -> Vec<Case> {
    vec![
        case(
            "every capability: the neighbour's instance does not open by a node made by hand",
            "up $(of mig=1g.5gb) --cap-add ALL >o3; docker exec job sh -c 'mknod /tmp/n c 241 21; mknod /tmp/m c 241 1; cuda-probe noderights /tmp/n; cuda-probe noderights /tmp/m' | grep -c EPERM",
            Works("2"),
        ),
        case(
            "all of them as a volume",
            "up $(of mig=1g.5gb) -v $DRIVER/dev/nvidia-caps:/dev/nvidia-caps",
            Refused("nvidia-caps"),
        ),
        case(
            "the neighbour's under an innocent name",
            "up $(of mig=1g.5gb) --device $DRIVER/dev/nvidia-caps/nvidia-cap21:/dev/innocent",
            Refused("/dev/innocent"),
        ),
        case(
            "a rule for all of them",
            "up $(of mig=1g.5gb) --device-cgroup-rule 'c 241:* rmw'",
            Refused("241:*"),
        ),
        case(
            "an empty directory over them",
            "up $(of mig=1g.5gb) --tmpfs /dev/nvidia-caps",
            Refused("/dev/nvidia-caps"),
        ),
        case(
            "--gpus of one of them beside it",
            "up $(of mig=1g.5gb) --gpus device=0:3",
            Refused("remove `--gpus`"),
        ),
        case("--privileged", "up $(of mig=1g.5gb) --privileged", Refused("remove `--privileged`")),
        case(
            "NVIDIA's variables for all of them",
            "sees $(of mig=1g.5gb) -e NVIDIA_MIG_MONITOR_DEVICES=all -e NVIDIA_MIG_CONFIG_DEVICES=all -e NVIDIA_VISIBLE_DEVICES=all -e CUDA_VISIBLE_DEVICES=MIG-5b1e7000-0000-5000-8000-000000000a01",
            Works("1 device of 14 SMs"),
        ),
        case("mig-caps of another case", "up $(of mig=1g.5gb mig-caps=Monitor)", Refused("sublet.mig-caps")),
        case("mig-caps that there are not", "up $(of mig=1g.5gb mig-caps=all)", Refused("sublet.mig-caps")),
        case("mig-caps without a value", "up $(of mig=1g.5gb mig-caps=)", Refused("sublet.mig-caps")),
        case("mig-caps by number", "up $(of mig=1g.5gb mig-caps=nvidia-cap1)", Refused("sublet.mig-caps")),
        case(
            "mig-caps of which one is allowed",
            r#"printf '[mig]\nallow_caps = ["monitor"]\n' >>$CONFIG; up $(of mig=1g.5gb mig-caps=monitor,config)"#,
            Refused("sublet.mig-caps"),
        ),
        case(
            "another node in its place",
            "aside $DRIVER/dev/nvidia-caps/nvidia-cap84; mknod $DRIVER/dev/nvidia-caps/nvidia-cap84 c 241 21; up $(of mig=1g.5gb)",
            Refused("nvidia-cap84"),
        ),
        case(
            "a link to the neighbour's in its place",
            "aside $DRIVER/dev/nvidia-caps/nvidia-cap84; ln -s nvidia-cap21 $DRIVER/dev/nvidia-caps/nvidia-cap84; up $(of mig=1g.5gb)",
            Refused("nvidia-cap84"),
        ),
    ]
}

/// Instances that are destroyed, created again, or created on request.
fn instances() -> Vec<Case> {
    vec![
        case(
            "destroyed a moment ago",
            "destroy; up $(of mig=1g.5gb); r=$?; make; exit $r",
            Refused("no MIG device is a 1g.5gb"),
        ),
        case(
            "destroyed a moment ago, asked for by its UUID",
            "destroy; up $(of gpu=MIG-5b1e7000-0000-5000-8000-000000000a04); r=$?; make; exit $r",
            Refused("a04"),
        ),
        case(
            "made again with the same ids, asked for by what it was",
            "sublet status >/dev/null; u=$(sublet mig list --format json | grep -o 'MIG-[-0-9a-f]*' | tail -1); destroy; make; up $(of gpu=$u)",
            Refused("no MIG device of this host is"),
        ),
        case(
            "destroyed while a container has it: its lease is lost",
            "ask $(of mig=1g.5gb) probe sleep 60; destroy; sublet status --format json | grep -o lost | head -1; docker rm -f job >/dev/null; make; leases",
            Works("lost\n1"),
        ),
        case(
            "to be destroyed while a share's MPS server runs: the driver refuses, and the share goes on",
            "ask $(of gpu=0:3 sm=50) probe sleep 60; destroy || docker exec job probe info",
            Works("\"sm\":8,"),
        ),
        case(
            "made for a container whose client is killed",
            r"printf '[mig]\ndynamic = true\n' >>$CONFIG; destroy; timeout -s KILL 0.3 docker run --name job --network none --runtime sublet $(of mig=1g.5gb) probe sleep 60; sleep 1; docker rm -f job >/dev/null; sublet gc; instances; make",
            Works("2"),
        ),
    ]
}

/// The same by CDI devices.
fn cdi() -> Vec<Case> {
    vec![
        case(
            "by CDI: destroyed since the file was",
            "destroy; run --runtime low --device sublet/share=one probe probe hold 60; r=$?; make; exit $r",
            Refused("sublet-hook"),
        ),
        case(
            "by CDI: mig-caps beside it",
            "run --runtime low --device sublet/share=one $(of mig-caps=monitor) probe probe hold 60",
            Refused("sublet.mig-caps"),
        ),
    ]
}

/// The engine, the daemon and sublet's own files.
fn around() -> Vec<Case> {
    vec![
        case(
            "restarted",
            "up $QUARTER >o3; docker restart -t 0 job >/dev/null; info job && [ $(leases) = 2 ]",
            Share(QUARTER),
        ),
        case(
            "exec with limits of its own",
            "up $QUARTER >o3; info -e CUDA_VISIBLE_DEVICES=0 -e CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 -e CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage job",
            Share(QUARTER),
        ),
        case(
            "dockerd is killed, and the container meanwhile",
            "up $QUARTER >o3; p=$(pid); dockerd_ends; kill -9 $p; while [ -d /proc/$p ]; do sleep 0.05; done; leases",
            Works("1"),
        ),
        case(
            "the instance's MPS daemon is killed: exec has it started",
            "ask $QUARTER probe sleep 60; end_daemons; info job",
            Share(QUARTER),
        )
        .harming(),
        case(
            "the instance's MPS daemon is killed: the next container has it started",
            "end_daemons; up $QUARTER",
            Share(QUARTER),
        )
        .harming(),
        case("the instance's MPS daemon is stopped", "stop_daemons; up $QUARTER", Refused("does not answer"))
            .harming(),
        case(
            "ledger and copy are lost while it runs",
            "up $QUARTER >o3; rm $STATE/ledger.json $STATE/ledger.json.copy; info job && [ $(leases) = 2 ]",
            Share(QUARTER),
        ),
        case(
            "the inventory is noise",
            "head -c 4k /dev/urandom >$STATE/inventory.json; up $QUARTER",
            Share(QUARTER),
        ),
        case(
            "the configuration is broken while it runs",
            "up $QUARTER >o3; echo '[' >>$CONFIG; info job",
            Share(QUARTER),
        ),
    ]
}
