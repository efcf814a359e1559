"""Processes whose first thread has ended while others compute: docs/security.md, B13. The guard ends those that cheat, the end
of the container ends those that do not, and nobody else is touched."""

import os
import re
import signal
import time

from . import engines, process
from .table import Rows, Wrong

WHEN = [
    ("early", "the first process's first thread ends at once"),
    ("context", "… once the CUDA context is made"),
    ("child", "… a child's"),
    ("children", "… those of two children"),
]


def leaders(table, group, machine):
    start = used_mib(machine)
    os.makedirs("/srv/no-hooks", exist_ok=True)
    by_shim = engines.Podman([], ["podman", "--hooks-dir=/srv/no-hooks", "--runtime=/usr/bin/sublet-runtime"], "podman, shim")
    by_shim.volumes = machine.podman.volumes
    for job, engine in enumerate((machine.docker, machine.podman, by_shim)):
        each(Rows(table, group, job, engine.name, "driver API"), machine, engine)
    left = machine.clear()
    rows = Rows(table, group, 9)
    rows.hold("after the group", "no lease", left or "no lease", not left)

    def memory():
        # The driver takes a moment to remove the contexts of killed processes.
        right = process.eventually(lambda: used_mib(machine) <= start, 10, 0.3)
        return f"{start} MiB before, {used_mib(machine)} MiB after", right

    if not machine.simulated:
        rows.ask("the GPU's memory", "as before", memory)


def each(rows, machine, engine):
    for when, title in WHEN:
        cheats(rows, machine, engine, when, title)
        ends(rows, machine, engine, when, title, "stop")
        ends(rows, machine, engine, when, title, "rm")


def used_mib(machine):
    """What the driver says is used. An MPS server that is idle has some, so it is ended first."""
    if machine.simulated:
        return 0
    process.run(["sublet", "mps", "stop", machine.devices()[0]["uuid"]])
    smi = machine.given["program_directories"][0] + "/nvidia-smi" if machine.given["program_directories"] else "nvidia-smi"
    return int(process.must([smi, "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]).split()[0])


def started(machine, engine, name, when, mib, cheat=False):
    """A container with a share of 4 GiB whose program takes `mib` in each process, once it has that."""
    number = 2 if when == "children" else 1
    part = {"gpu": "0", "sm": "20", "memory": f"{4096 * number}MiB", "processes": str(number), "wait": "30s"}
    done = engine.start(name, part, machine.leader(mib, 300, when, cheat))
    if not done.ok:
        raise Wrong(done.why())
    took = lambda: engine.logs(name).count('"CUDA_SUCCESS"' if machine.simulated else '"took"') >= (1 if cheat else number)
    if not process.eventually(took, 30, 0.05):
        raise Wrong(f"took nothing: {engine.logs(name)[-300:]}")


def cheats(rows, machine, engine, when, title):
    neighbour, cheat = f"good{rows.job}{rows.count}", f"cheat{rows.job}{rows.count}"
    part = {"gpu": "0", "sm": "20", "memory": "4096MiB", "wait": "30s"}

    def look():
        if not engine.start(neighbour, part, machine.hold(120)).ok or not process.eventually(lambda: '"info"' in engine.logs(neighbour), 30):
            raise Wrong(f"no neighbour: {engine.logs(neighbour)[-200:]}")
        since = time.monotonic()
        started(machine, engine, cheat, when, 20480, cheat=True)
        took = time.monotonic()
        gone = process.eventually(lambda: engine.state(cheat, ".State.Status") == "exited", 20)
        seconds = time.monotonic() - took
        identity = engine.state(cheat, ".Id")
        events = lambda: process.run(["sublet", "events", "--since", "2m", "--format", "json"]).out.splitlines()
        told = process.eventually(lambda: any(identity in line and '"memory"' in line for line in events()), 5)
        return f"{'ended' if gone else 'still there'} {seconds:.1f} s after it had it ({took - since:.1f} s after the start); event: {told}", gone and told

    cheated = rows.ask(f"{title}: 20 GiB of 4 by a spoilt limit", "ended by the guard, with an event", look, 60)

    def unharmed():
        running, said = engine.state(neighbour, ".State.Status"), engine.logs(neighbour)
        ended = '"end"' in said
        return f"{running}, {said[-150:] if ended else 'no error'}", running == "running" and not ended

    if cheated is not None:
        rows.ask("… its neighbour", "runs, no error", unharmed)
    engine.remove(neighbour, cheat)


def ends(rows, machine, engine, when, title, by):
    """An honest one is active, and nothing of it is left after its end."""
    name = f"{by}{rows.job}{rows.count}"
    expected = "active; then nothing of it is left"
    # Podman's own `kill` is all that its runtime hears, which takes such a container for stopped. Without the shim nothing of
    # sublet's is called then: `status` says what does it.
    unheard = engine.name in ("podman", "podman, rootless") and when in ("early", "context")

    def look():
        started(machine, engine, name, when, 2048)
        identity = engine.state(name, ".Id")
        own = lambda: [lease["state"] for lease in machine.leases() if lease["container_id"] == identity]
        state, begun = own(), time.monotonic()
        stopped = engine.call("stop", "--time=1", name) if by == "stop" else None
        removed = engine.call("rm", "--force", "--time=1", name) if engine.name != "docker" else engine.call("rm", "--force", name)
        named = re.search(r"kill -KILL (\d+)", process.run(["sublet", "status"]).out) if unheard else None
        if named:
            os.kill(int(named[1]), signal.SIGKILL)
            removed = engine.call("rm", "--force", "--time=1", name)
        gone = process.eventually(lambda: not own(), 20, 0.3)
        seen = f"{', '.join(state)}; {'no lease' if gone else 'a lease left'} after {time.monotonic() - begun:.1f} s"
        seen += f"; {by} fails, status names the command" if named else ""
        seen += f"; rm: {'ok' if removed.ok else removed.why()[-150:]}"
        right = state == ["active"] and gone and removed.ok and bool(named) == unheard
        return seen + ("" if stopped is None or stopped.ok or named else f"; stop: {stopped.why()[-150:]}"), right

    if unheard:
        expected = "active; refused, with the command that ends it; then nothing of it is left"
    rows.ask(f"{title}: honest, {'stop, then rm' if by == 'stop' else 'rm --force'}", expected, look, 40)
    engine.remove(name)
