"""Timings, as information: nothing is asserted."""

import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from . import process
from .machine import IMAGE
from .table import INFO, Rows

AT_ONCE, SECONDS, RUNS = 7, 6, 25
MODES = [
    ("time-slice", {"mode": "time-slice"}, None),
    ("mps", {"mode": "mps"}, "100"),
    ("mps 14.2 %", {"mode": "mps", "sm": "14.2"}, "14.2"),
]


def bench(table, group, machine):
    rows = Rows(table, group, 0, "podman", "YOLOS-small")
    for title, share, percent in MODES:
        check = f"{AT_ONCE} at once, {title}: containers / by hand"
        if not {"torch", "transformers"} <= set(machine.given["installed"]):
            rows.skip(check, "torch and transformers: not installed on this host")
        elif table.clock.left() < 60:
            rows.skip(check, "time")
        else:
            containers, hand = in_containers(machine, share), by_hand(machine, percent)
            rows.add(check, "", f"mean ms {containers} / {hand}", INFO)
    rows = Rows(table, group, 1, "docker")
    for title, words in RUN:
        if table.clock.left() < 30:
            rows.skip(f"docker run --rm true: {title}", "time")
            continue
        if title == WARM:
            machine.docker.start("warm", {"gpu": "0", "sm": "10", "memory": "2GiB"}, ["sleep", "600"])
        command = ["docker", "run", "--rm", "--network=none", *words, "img", "true"]
        rows.add(f"docker run --rm true: {title}", "", timed(command), INFO)
    machine.clear()


def annotated(**share):
    annotations = [f"--annotation=sublet.{key}={value}" for key, value in share.items()]
    return ["--runtime=sublet", *annotations]


# The container with the warm daemon comes last. Until then the GPU has no MPS lease, so a time-slice container can start.
WARM = "sublet, mps, daemon warm"
RUN = [
    ("runc", ["--runtime=runc"]),
    ("sublet, no share", annotated()),
    ("sublet, time-slice", annotated(gpu="0", mode="time-slice")),
    (WARM, annotated(gpu="0", sm="25", memory="2GiB")),
]


def timed(command):
    taken = []
    for _ in range(RUNS):
        start = time.monotonic()
        done = process.run(command, 30)
        taken.append((time.monotonic() - start) * 1e3)
        if not done.ok:
            return done.why()
    return f"median of {RUNS}: {statistics.median(taken):.0f} ms, fastest {min(taken):.0f}"


def barrier():
    at = Path("/srv/barrier")
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir(parents=True)
    return at


def go(at, seconds=90):
    """A directory in which all processes wait for the last one."""
    came = process.eventually(lambda: len(list(at.glob("ready.*"))) == AT_ONCE, seconds)
    (at / "go").touch()
    return came


def mean(lines):
    return f"{statistics.mean(json.loads(line)['mean'] for line in lines):.2f}"


def in_containers(machine, share):
    at = barrier()
    command = lambda me: [machine.given["python"], "/workloads/yolos.py", str(SECONDS), str(at), str(me)]
    for me in range(AT_ONCE):
        started = machine.podman.start(f"y{me}", dict(share, gpu="0"), command(me), ["--volume", f"{at}:{at}"])
        if not started.ok:
            machine.podman.remove_all()
            return started.why()
    came = go(at)
    ended = process.eventually(lambda: all(machine.podman.state(f"y{me}", ".State.Status") == "exited" for me in range(AT_ONCE)), SECONDS + 30, 0.5)
    lines = [line for me in range(AT_ONCE) for line in machine.podman.logs(f"y{me}").splitlines() if line.startswith("{")]
    machine.podman.remove_all()
    machine.no_leases()
    return mean(lines) if came and ended and len(lines) == AT_ONCE else f"{len(lines)} of {AT_ONCE} ended"


def by_hand(machine, percent):
    """The same processes without containers or sublet, with the same files: in a chroot that contains the driver."""
    at, root = barrier(), "/srv/hand"
    os.makedirs(root, exist_ok=True)
    pipe = at / "mps"
    pipe.mkdir()
    environment = dict(os.environ, HOME="/tmp", HF_HUB_OFFLINE="1", CUDA_MPS_PIPE_DIRECTORY=str(pipe), CUDA_MPS_LOG_DIRECTORY=str(pipe))
    path = ":".join([*machine.given["program_directories"], environment["PATH"]])
    control = ["env", f"PATH={path}", "CUDA_VISIBLE_DEVICES=0", "nvidia-cuda-mps-control"]
    libraries = ":".join(machine.given["library_directories"])
    binds = [f"mount --bind {IMAGE} {root}", f"cd {root}", "mount --rbind /proc proc", "mount --rbind /dev dev", "mount --rbind /sys sys", "mkdir -p srv workloads", "mount --rbind /srv srv", "mount --bind /srv/work workloads"]
    for volume in [*machine.given["volumes"], *[f"{one}:{one}:ro" for one in machine.given["driver_binds"]]]:
        source, target = volume.split(":")[:2]
        make = f"mkdir -p .{target}" if os.path.isdir(source) else f"mkdir -p .{os.path.dirname(target)}; touch .{target}"
        binds.append(f"{make}; mount --rbind {source} .{target}")
    # If the driver's files are in the distribution's directories, ldconfig makes the loader's names for them. Only one process
    # at a time does this, because all of them use the same files.
    enter = "set -e; " + "; ".join(binds) + '; flock /srv chroot . /sbin/ldconfig; exec chroot . "$@"'
    if percent:
        process.must([*control, "-d"], env=environment)
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percent
    else:
        environment.pop("CUDA_MPS_PIPE_DIRECTORY")
    environment.update(LD_LIBRARY_PATH=libraries, CUDA_VISIBLE_DEVICES="0")
    started = []
    for me in range(AT_ONCE):
        command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", enter, "enter", machine.given["python"], "/workloads/yolos.py", str(SECONDS), str(at), str(me)]
        started.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    came = go(at)
    lines, why = [], "" if came else "not all began; "
    for one in started:
        try:
            out, error = one.communicate(timeout=SECONDS + 30)
        except subprocess.TimeoutExpired:
            one.kill()
            out, error = one.communicate(timeout=10)
            why += "one did not end in time; "
        mine = [line for line in out.splitlines() if line.startswith("{")]
        why += "" if mine else f"{error.strip().splitlines()[-1:]}; "
        lines += mine
    if percent:
        quit_it = subprocess.Popen(control, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        quit_it.communicate("quit\n", timeout=30)
    return mean(lines) if len(lines) == AT_ONCE else f"{len(lines)} of {AT_ONCE} ended: {why}"
