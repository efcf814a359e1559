"""The MPS control daemon, which speaks with one program at a time: many processes at once, each of which has to ask it, and a
container that keeps it waiting (docs/evidence/2026-11-25-mps-control.md)."""

import collections
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import process, shares
from .machine import report
from .table import Rows, Wrong

LEDGER = Path("/run/sublet/ledger.json")

HOLD = "import socket, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect('/run/sublet/mps/control'); print('held', flush=True); time.sleep(120)"


def at_once(table, group, machine, job, execs=16, mib=4096):
    rows, engine = Rows(table, group, job, "docker", "driver API"), machine.docker
    if not engine.start("one", {"gpu": "0", "sm": "20", "memory": f"{mib}MiB"}, machine.hold(120)).ok:
        return rows.hold(f"{execs} execs at once", "a container", engine.logs("one")[-200:], False)
    process.eventually(lambda: '"info"' in engine.logs("one"), 30)

    def look():
        forget_answers()
        start = time.monotonic()
        with ThreadPoolExecutor(execs) as pool:
            found = [report(done) for done in pool.map(lambda _: engine.execute("one", machine.probe()), range(execs))]
        seen = collections.Counter(f"{device['sm']} SMs" for one in found for device in one["devices"])
        right = all(shares.sees(machine, one, 20, None, 1)[1] for one in found)
        return f"{', '.join(f'{count} × {what}' for what, count in seen.items())}, in {time.monotonic() - start:.1f} s", right

    rows.ask(f"{execs} execs at once, long after the MPS daemon was last asked", f"{execs} with the share", look, 40)
    engine.remove("one")


def forget_answers():
    """As if the daemon had last answered long ago: each process asks it."""
    ledger = json.loads(LEDGER.read_text())
    for daemon in ledger["daemons"]:
        daemon["answered_at"] = 1
    new = LEDGER.with_name("ledger.json.new")
    new.write_text(json.dumps(ledger))
    new.chmod(0o644)
    os.rename(new, LEDGER)


def held(table, group, machine, job):
    rows = Rows(table, group, job, "docker", "driver API")
    engine, mib = machine.docker, 4096
    part = {"gpu": "0", "sm": "20", "memory": f"{mib}MiB"}
    more = part | {"sm": "40"}

    begun = {}

    def look():
        if not engine.start("good", part, machine.hold(120)).ok or not process.eventually(lambda: '"info"' in engine.logs("good"), 30):
            raise Wrong(f"no neighbour: {engine.logs('good')[-200:]}")
        if not engine.start("holder", part, ["python3", "-c", HOLD]).ok or not process.eventually(lambda: "held" in engine.logs("holder"), 20):
            raise Wrong(f"no connection: {engine.logs('holder')[-200:]}")
        start = begun["held"] = time.monotonic()
        new = engine.start("new", more, machine.hold(30))
        said = "it started" if new.ok else new.why()[new.why().find("does not answer") :][:120]
        # The simulated daemon has connections of its clients, too, and names them beside it.
        named = bool(re.search(r"\bholder\b", new.why()))
        return f"{said}, after {time.monotonic() - start:.1f} s", not new.ok and named

    seen = rows.ask("beside a container that keeps a connection to the MPS daemon: one that needs more", "refused, with that container's name", look, 40)
    if seen is None:
        return rows.skip("… the others", "time")

    def unharmed():
        running, ended = engine.state("good", ".State.Status"), '"end"' in engine.logs("good")
        return f"{running}, {'an error' if ended else 'no error'}", running == "running" and not ended

    def ended():
        gone = process.eventually(lambda: engine.state("holder", ".State.Status") == "exited", 15)
        return f"ended after {time.monotonic() - begun['held']:.1f} s" if gone else "it goes on", gone

    def after():
        engine.remove("new")
        new = engine.start("new", more, machine.hold(30))
        right = new.ok and process.eventually(lambda: '"info"' in engine.logs("new"), 30)
        return "it computes" if right else new.why()[-200:] or engine.logs("new")[-200:], right

    rows.ask("… its neighbour", "runs, no error", unharmed)
    rows.ask("… itself", "ended by the guard", ended)
    rows.ask("… after its end, the one that needs more", "it computes", after, 30)
    engine.remove("good", "holder", "new")
