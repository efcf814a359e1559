"""What keeps a server that a team shares: an error of a program's own is its container's and the GPU stays healthy; the report
beside the runs' own seconds; an idle GPU is left alone; with four GPUs placement by link, a drain with its reason, and the report of each GPU."""

import json
import os
import re
import statistics
import time
from datetime import datetime
from itertools import combinations
from pathlib import Path

from . import process
from .table import INFO, Rows, Skip, Wrong
from .used import smi

# Of how `nvidia-smi topo -m` says that two GPUs are joined, the closest first.
JOINS = ["NV", "PIX", "PXB", "PHB", "NODE", "SYS"]
# The report may differ by so much from what the engine says that its containers ran.
APART = 0.05
# How long a container runs for that: to create and to delete it takes some tenths of a second, in which it has its share.
RUN = 40
# An idle GPU's power may differ by so much.
POWER = 0.05


def server(table, group, machine):
    rows = Rows(table, group, 0, "docker", "driver API")
    rows.ask("a kernel that writes to an illegal address", "an event of its container, the GPU healthy", lambda: illegal(rows, machine), 60)
    rows.ask("… a share after it", "it starts", lambda: starts(machine))
    reported(rows, machine)
    rows.ask("nothing has a share: power without the service and with it", f"{POWER:.0%} more at most, and it has no GPU open", lambda: idle(machine), 40)
    rows = Rows(table, group, 1, "podman")
    if machine.count() < 4:
        for check in ("any:2, the closest two", "drain", "report of four GPUs"):
            rows.skip(check, f"the host has {machine.count()} GPU(s)")
    else:
        rows.ask("any:2, the closest two", "none closer", lambda: closest(machine, None), 30)
        rows.ask("any:2 while GPU 0 is held", "none closer of the others", lambda: closest(machine, 0), 30)
        rows.ask("drain 1 --reason fan --until 1h", "the others serve, one more is refused with the reason", lambda: drained(machine), 60)
        each_gpu(rows, machine)
    left = machine.clear()
    Rows(table, group, 9).hold("after the group", "no lease", left or "no lease", not left)


def events(kind, container):
    text = process.must(["sublet", "events", "--format", "json", "--filter", f"kind={kind}"])
    found = [json.loads(line) for line in text.splitlines()]
    return [event for event in found if event.get("container_id") == container]


def health(machine):
    return machine.devices()[0]["health"]["state"]


def illegal(rows, machine):
    docker, name = machine.docker, "illegal"
    # The service watches a GPU with a lease within a few seconds; a container alone on its GPU is known without its pid.
    command = ["cuda-probe", "hold", "90"] if machine.simulated else ["python3", "/workloads/illegal.py", "10", "60"]
    started = docker.start(name, {"gpu": "0", "mode": "time-slice", "wait": "30s"}, command)
    if not started.ok:
        raise Wrong(started.why())
    identity, result = docker.state(name, ".Id"), "CUDA_ERROR_ILLEGAL_ADDRESS"
    if machine.simulated:
        pid = docker.state(name, ".State.Pid")
        fault = [f"{machine.given['bin']}/sublet-sim", "xid", "0", "31", pid, "MMU Fault", "--root", "/srv/sim"]
        # The service may not watch the GPU yet.
        process.eventually(lambda: process.must(fault) is None or events("gpu-error", identity), 20, 2)
    else:
        process.eventually(lambda: '"fault"' in docker.logs(name), 40, 0.5)
        result = (re.findall(r'"result": "(\w+)"', docker.logs(name)) or [docker.logs(name)[-200:]])[-1]
    process.eventually(lambda: events("gpu-error", identity), 20, 0.5)
    found, state = events("gpu-error", identity), health(machine)
    docker.remove(name)
    if not found and result == "CUDA_ERROR_ILLEGAL_ADDRESS" and state == "ok" and not is_log_readable(machine):
        rows.add("the kernel's log", "", f"it cannot be read here; the program: {result}; GPU 0: {state}", INFO)
        raise Skip("no event, and the kernel's log cannot be read")
    said = found[0]["text"][:200] if found else "no event"
    right = bool(found) and "Xid" in said and state == "ok" and "ILLEGAL" in result
    return f"{result}; {len(found)} event(s): {said}; GPU 0: {state}", right


def is_log_readable(machine):
    try:
        with open("/srv/sim/dev/kmsg" if machine.simulated else "/dev/kmsg", "rb"):
            return True
    except OSError:
        return False


def starts(machine):
    done = machine.docker.run({"gpu": "0", "sm": "25", "memory": "2GiB", "wait": "30s"}, ["true"])
    return "it starts" if done.ok else done.why(), done.ok


def idle(machine):
    def watts():
        """Of GPU 0: the median of ten seconds, after ten more."""
        time.sleep(10)
        found = []
        for _ in range(10):
            done = process.run([smi(machine), "-i", "0", "--query-gpu=power.draw", "--format=csv,noheader,nounits"])
            said = done.out.strip()
            if not re.fullmatch(r"[\d.]+", said):
                raise Skip(f"nvidia-smi tells no power: {said or done.why()}")
            found.append(float(said))
            time.sleep(1)
        return statistics.median(found)

    machine.end_serve()
    try:
        without = watts()
    finally:
        machine.start_serve()
    beside, opened = watts(), [os.readlink(file) for file in Path(f"/proc/{machine.serve.pid}/fd").iterdir()]
    opened = sorted({path for path in opened if path.startswith("/dev/nvidia")})
    return f"{without:.1f} W without, {beside:.1f} W with it; open: {', '.join(opened) or 'none'}", beside <= without * (1 + POWER) and not opened


def report(by):
    rows = json.loads(process.must(["sublet", "report", "--since", "1d", "--by", by, "--format", "json"]))["rows"]
    return {row["name"]: row for row in rows}


def hours(rows, name, key="whole_gpu_hours"):
    return (rows.get(name) or {}).get(key) or 0.0


def own_seconds(engine, name):
    """What the engine says that the container ran."""
    moments = [engine.state(name, f".State.{key}") for key in ("StartedAt", "FinishedAt")]
    # Docker writes RFC 3339, Podman as Go prints a time: `2026-11-28 04:40:34.123456789 +0000 UTC`.
    words = [re.match(r"(\S{10})[T ](\d\d:\d\d:\d\d)(\.\d{1,6})?", moment) for moment in moments]
    begun, ended = (datetime.fromisoformat("T".join(word.group(1, 2)) + (word.group(3) or "")) for word in words)
    return (ended - begun).total_seconds()


def ended(engine, begun, name):
    """Waits for the end of a container."""
    if not begun[name].ok:
        raise Wrong(begun[name].why())
    if not process.eventually(lambda: engine.state(name, ".State.Status") == "exited", RUN + 30, 0.5):
        raise Wrong("it did not end")


def reported(rows, machine):
    """Two owners' runs at the same time, with a quarter and a half of the SMs."""
    docker, shares, begun = machine.docker, {"vision": 25, "sound": 50}, {}
    for owner, percent in shares.items():
        share = {"gpu": "0", "sm": str(percent), "memory": "2GiB", "owner": owner, "wait": "30s"}
        begun[owner] = docker.start(owner, share, machine.hold(RUN))

    def of(owner, percent):
        ended(docker, begun, owner)
        seconds, told = own_seconds(docker, owner), report("owner")
        whole, sm = hours(told, owner) * 3600, hours(told, owner, "sm_gpu_hours") * 3600
        right = abs(whole / seconds - 1) <= APART and abs(sm / whole * 100 / percent - 1) <= 0.01
        return f"it ran {seconds:.1f} s; the report: {whole:.1f} s held, {sm:.1f} s by SMs, {whole / seconds * 100 - 100:+.1f} %", right

    for owner, percent in shares.items():
        rows.ask(f"report: {owner}, {percent} % of the SMs", f"{APART:.0%} apart at most", lambda: of(owner, percent), RUN + 10)
    docker.remove(*shares)
    total = json.loads(process.must(["sublet", "report", "--since", "1d", "--format", "json"]))["total"]
    used = total["used_gpu_hours"]
    seen = "nothing" if used is None else f"{used * 3600:.0f} s computed of {total['measured_gpu_hours'] * 3600:.0f} s that it measured"
    rows.add("report: what the driver tells of use", "", seen, INFO)


def joins(machine):
    """By pairs of GPUs' numbers, how far apart they are: 0 is the closest."""
    count = machine.count()
    if machine.simulated:
        bridges = [(0, 2), (1, 3)] if machine.given["topology"] == "h100x4-bridges" else list(combinations(range(count), 2))
        return {pair: 0 if pair in bridges else 5 for pair in combinations(range(count), 2)}
    text = re.sub(r"\x1b\[[0-9;]*m", "", process.must([smi(machine), "topo", "-m"]))
    lines = [line.split() for line in text.splitlines() if re.match(r"\s*GPU\d", line)]
    table = {line[0]: line[1:] for line in lines[1:]}
    rank = lambda word: next((at for at, join in enumerate(JOINS) if word.startswith(join)), len(JOINS))
    return {(one, other): rank(table[f"GPU{one}"][other]) for one, other in combinations(range(count), 2)}


def closest(machine, held):
    podman, ranks = machine.podman, joins(machine)
    numbers = {device["uuid"]: number for number, device in enumerate(machine.devices())}
    try:
        if held is not None:
            podman.start("holder", {"gpu": str(held), "mode": "exclusive", "wait": "30s"}, ["sleep", "300"])
            ranks = {pair: rank for pair, rank in ranks.items() if held not in pair}
        before = {lease["device"] for lease in machine.leases()}
        explained = json.loads(process.must(["sublet", "explain", "gpu=any:2", "mode=exclusive", "--format", "json"]))
        started = podman.start("pair", {"gpu": "any:2", "mode": "exclusive", "wait": "30s"}, ["sleep", "300"])
        if not started.ok:
            raise Wrong(started.why())
        pair = tuple(sorted(numbers[lease["device"]] for lease in machine.leases() if lease["device"] not in before))
    finally:
        podman.remove_all()
        machine.no_leases()
    best = min(ranks.values())
    said = [gpu["number"] for gpu in explained["gpus"]]
    right = ranks.get(pair) == best and said == [str(number) for number in pair]
    all_alike = "; all are alike" if len(set(ranks.values())) == 1 else ""
    name = lambda rank: (JOINS + ["unknown"])[rank] if rank is not None else "none"
    return f"{pair}: {name(ranks.get(pair))}, the closest is {name(best)}{all_alike}; explain: {said}, {explained['joined']}", right


def drained(machine):
    podman, count = machine.podman, machine.count()
    process.must(["sublet", "drain", "1", "--reason", "fan", "--until", "1h"])
    try:
        for number in range(count - 1):
            started = podman.start(f"all{number}", {"mode": "exclusive"}, ["sleep", "300"])
            if not started.ok:
                raise Wrong(started.why())
        taken = {lease["device"] for lease in machine.leases()}
        more = podman.run({"mode": "exclusive"}, ["true"])
        said = more.out + more.err + process.run(["sublet", "status", "--last-error", "--verbose"]).out
        status = process.must(["sublet", "status"])
        free = machine.devices()[1]["uuid"] not in taken
        right = len(taken) == count - 1 and free and not more.ok and "drained" in said and "fan" in status
        reason = next((line.strip() for line in said.splitlines() if "drained" in line), said.strip()[-200:])
        return f"{len(taken)} serve, GPU 1 is {'free' if free else 'taken'}; one more: {'started' if more.ok else reason[:200]}", right
    finally:
        process.must(["sublet", "undrain", "1"])
        podman.remove_all()
        machine.no_leases()


def each_gpu(rows, machine):
    """A run on each GPU at the same time, with the whole of it."""
    docker, devices = machine.docker, machine.devices()[:4]
    names, before = [f"four{number}" for number in range(4)], report("gpu")
    begun = {
        name: docker.start(name, {"gpu": str(number), "mode": "exclusive", "wait": "30s"}, machine.hold(RUN))
        for number, name in enumerate(names)
    }

    def of(number, name):
        ended(docker, begun, name)
        seconds, uuid = own_seconds(docker, name), devices[number]["uuid"]
        held = (hours(report("gpu"), uuid) - hours(before, uuid)) * 3600
        return f"its container ran {seconds:.1f} s; the report: {held:.1f} s, {held / seconds * 100 - 100:+.1f} %", abs(held / seconds - 1) <= APART

    for number, name in enumerate(names):
        rows.ask(f"report: GPU {number}", f"{APART:.0%} apart at most", lambda: of(number, name), RUN + 10)
    docker.remove(*names)
