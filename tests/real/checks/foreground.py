"""`run` in the foreground by plain runc and crun, by the hooks and by the shim, without systemd, with and without `sublet
serve`: the call returns when its container has ended, and nothing is left (docs/prestart.md)."""

import json
import os
import time
from pathlib import Path

from . import process, shares
from .machine import IMAGE, WORK, report
from .table import Rows, Wrong

HOOK = "/usr/libexec/sublet/sublet-hook"
BUNDLES = Path("/var/lib/containers/bundles")
LOW_LEVEL = Path("/etc/sublet/conf.d/low-level.toml")


def foreground(table, group, machine):
    for round, served in enumerate((True, False)):
        if not served:
            machine.end_serve()
        for job, runtime in enumerate(("runc", "crun")):
            rows = Rows(table, group, 2 * round + job, runtime, "driver API")
            for entry in ("createRuntime", "prestart", "shim"):
                title = f"run by {entry}, {'with' if served else 'without'} the service"
                rows.ask(title, "its share; returns at its end; no lease, no daemon left", lambda: returns(machine, runtime, entry), 70)
    machine.start_serve()


def returns(machine, runtime, entry):
    share = {"sublet.sm": "25", "sublet.memory": f"{machine.memory_mib}MiB"}
    bundle = made(machine, runtime, entry, share)
    program = runtime
    if entry == "shim":
        LOW_LEVEL.write_text(f'[runtime]\nlow_level = ["{runtime}"]\n')
        program = "sublet-runtime"
    try:
        begun = time.monotonic()
        done = process.run([program, "run", "--bundle", str(bundle), bundle.name], 60)
        seconds = time.monotonic() - begun
    finally:
        LOW_LEVEL.unlink(missing_ok=True)
        process.run(["umount", str(bundle / "rootfs")])
    if done.status == 124:
        raise Wrong("it has not returned after 60 s")
    seen, right = shares.sees(machine, report(done), 25, machine.memory_mib, 1)
    left = machine.no_leases(5)
    # That of a shared server may be idle for a while.
    process.run(["sublet", "mps", "stop", machine.devices()[0]["uuid"]])
    daemons = lambda: process.run(["pgrep", "-f", "nvidia-cuda-mps-control -[df]"]).out.split()
    process.eventually(lambda: not daemons(), 10)
    ends = f"{'a lease' if left else 'no lease'}, {len(daemons())} daemons left"
    return f"{seen}; status {done.status} after {seconds:.1f} s; {ends}", right and done.ok and not left and not daemons()


def made(machine, runtime, entry, share):
    """A bundle whose root filesystem is the image's, and writable."""
    bundle = BUNDLES / f"{runtime}-{entry}"
    for name in ("rootfs", "upper", "work"):
        (bundle / name).mkdir(parents=True, exist_ok=True)
    layers = f"lowerdir={IMAGE},upperdir={bundle}/upper,workdir={bundle}/work"
    process.must(["mount", "-t", "overlay", "overlay", "-o", layers, str(bundle / "rootfs")])
    (bundle / "config.json").unlink(missing_ok=True)
    process.must(["runc", "spec", "--bundle", str(bundle)])
    config = json.loads((bundle / "config.json").read_text())
    config["process"].update(terminal=False, args=machine.probe(), env=["PATH=/usr/bin:/bin", "HOME=/tmp", "LC_ALL=C.UTF-8"])
    config["root"] = {"path": "rootfs", "readonly": False}
    config["mounts"].append({"destination": "/workloads", "type": "bind", "source": str(WORK), "options": ["rbind", "ro"]})
    config["annotations"] = share
    if entry != "shim":
        hook = lambda stage: [{"path": HOOK, "args": ["sublet-hook", stage], "env": ["PATH=/usr/bin"]}]
        config["hooks"] = {entry: hook(entry), "poststop": hook("poststop")}
    (bundle / "config.json").write_text(json.dumps(config))
    os.chmod(bundle, 0o755)
    return bundle
