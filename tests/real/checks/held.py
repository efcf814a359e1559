"""A container that keeps a connection to its MPS daemon open and says nothing: what its neighbours, `exec` and new
containers see (docs/evidence/2026-11-25-mps-control.md)."""

import time

from . import process
from .table import Rows, Wrong

HOLD = "import socket, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect('/run/sublet/mps/control'); print('held', flush=True); time.sleep(120)"


def held(table, group, machine, job):
    rows = Rows(table, group, job, "docker", "driver API")
    engine, mib = machine.docker, 4096
    part = {"gpu": "0", "sm": "20", "memory": f"{mib}MiB"}
    more = part | {"sm": "40"}

    def look():
        if not engine.start("good", part, machine.hold(120)).ok or not process.eventually(lambda: '"info"' in engine.logs("good"), 30):
            raise Wrong(f"no neighbour: {engine.logs('good')[-200:]}")
        if not engine.start("holder", part, ["python3", "-c", HOLD]).ok or not process.eventually(lambda: "held" in engine.logs("holder"), 20):
            raise Wrong(f"no connection: {engine.logs('holder')[-200:]}")
        start = time.monotonic()
        new = engine.start("new", more, machine.hold(30))
        said = "it started" if new.ok else new.why()[new.why().find("the MPS daemon") :][:120]
        return f"{said}, after {time.monotonic() - start:.1f} s", not new.ok and "does not answer" in said

    seen = rows.ask("beside a container that keeps a connection to the MPS daemon: one that needs more", "refused: it does not answer", look, 40)
    if seen is None:
        return rows.skip("… the others", "time")

    def unharmed():
        running, said = engine.state("good", ".State.Status"), engine.logs("good")
        return f"{running}, {'an error' if '"end"' in said else 'no error'}", running == "running" and '"end"' not in said

    def after():
        engine.remove("holder", "new")
        new = engine.start("new", more, machine.hold(30))
        begun = new.ok and process.eventually(lambda: '"info"' in engine.logs("new"), 30)
        return "it computes" if begun else new.why()[-200:] or engine.logs("new")[-200:], begun

    rows.ask("… its neighbour", "runs, no error", unharmed)
    rows.ask("… after its end, the one that needs more", "it computes", after, 30)
    engine.remove("good", "holder", "new")
