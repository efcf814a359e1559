"""What `sublet status`, `metrics` and `top` say is used, beside nvidia-smi's figures of the same second, while seven containers
compute: by time-slicing, on a shared MPS server, each on an MPS server of its own. The same of the page of `top --web`. And what
the looks cost.
"""

import json
import os
import re
import resource
import shutil
import time
import urllib.request

from . import engines, process
from .table import INFO, Rows, Wrong

NAMES = [f"load{number}" for number in range(1, 8)]
# How long a look's samples go back (`nvmlDeviceGetProcessUtilization` is asked for five seconds).
SETTLED = 6


def used(table, group, machine):
    memory = f"{min(machine.memory_mib, machine.total_mib // 12)}MiB"
    modes = [
        ("time-slice", {"mode": "time-slice"}),
        ("shared MPS", {"sm": "12", "memory": memory}),
        ("dedicated MPS", {"sm": "12", "memory": memory, "isolation": "dedicated"}),
    ]
    cases = [(mode, share, gpus) for gpus in sorted({1, machine.count()}) for mode, share in modes]
    for job, (mode, share, gpus) in enumerate(cases):
        rows = Rows(table, group, job, "docker", "PyTorch")
        if not machine.simulated and "torch" not in machine.given["installed"]:
            rows.skip(mode, "torch: not installed on this host")
        elif started(rows, machine, mode, share, gpus):
            with Page(mode) as page:
                same_second(rows, machine, mode, page)
                cost(rows, machine, mode, page)
        left = machine.clear()
        rows.hold(f"{mode}: docker rm -f of all", "no lease", left or "no lease", not left)


def started(rows, machine, mode, share, gpus):
    for number, name in enumerate(NAMES):
        command = machine.hold(300)
        if not machine.simulated:
            command = [machine.given["python"], "/workloads/torch_load.py", "300", str(300 * (number + 1))]
        done = machine.docker.start(name, {**share, "gpu": str(number % gpus), "wait": "30s"}, command)
        if not done.ok:
            rows.hold(f"{mode}: seven containers", "seven start", f"{name}: {done.why()}", False)
            return False
    ready = process.eventually(lambda: all('"info"' in machine.docker.logs(name) for name in NAMES), 90, 0.5)
    rows.hold(f"{mode}: seven containers on {gpus} GPU(s)", "seven start", "seven" if ready else machine.docker.logs(NAMES[-1])[-300:], ready)
    time.sleep(SETTLED)
    return ready


class Page:
    """`sublet top --web`, asked as its page in a browser asks."""

    def __init__(self, mode):
        self.log = f"/tmp/page-{mode.replace(' ', '-')}.log"

    def __enter__(self):
        self.process = process.background(["sublet", "top", "--interval", "500ms", "--web", "127.0.0.1:0"], self.log)
        process.eventually(lambda: open(self.log).read().endswith("/\n"), 10)
        self.url = open(self.log).read().strip()
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)

    def containers(self):
        with urllib.request.urlopen(self.url + "data.json", timeout=10) as answer:
            return {container["name"]: container for container in json.load(answer)["containers"]}

    def cpu(self):
        """Seconds of CPU time that its process has used."""
        words = open(f"/proc/{self.process.pid}/stat").read().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def cost(self, asked, seconds=6):
        """What part of a CPU it uses, while it is asked twice a second or not at all."""
        before, begun = self.cpu(), time.monotonic()
        while (since := time.monotonic() - begun) < seconds:
            if asked:
                self.containers()
            time.sleep(0.5)
        return (self.cpu() - before) / since * 100


def same_second(rows, machine, mode, page):
    """The figures of each container by five programs, one after the other."""
    page.containers()
    # The driver samples a process when it computes. One that has just begun has no sample yet.
    process.eventually(lambda: machine.simulated or all(lease["used"] and shown_busy(mode, lease["used"]) for lease in leases_now()), 10)
    begun = time.monotonic()
    listed = by_nvidia_smi(machine)
    samples = pmon(machine)
    status = json.loads(process.must(["sublet", "status", "--format", "json"]))
    metrics = by_metrics(process.must(["sublet", "metrics"]))
    screen = process.must(["sublet", "top", "--once"])
    paged = page.containers()
    inside = {name: own_share(machine, name) for name in NAMES}
    again = by_nvidia_smi(machine)
    took = time.monotonic() - begun
    leases = {lease["name"]: lease for lease in status["leases"]}
    for name in NAMES:
        lease = leases.get(name)
        if lease is None:
            rows.hold(f"{mode}: {name}", "a lease", f"leases of {sorted(map(str, leases))}", False)
            continue
        pid, told = lease["pid"], lease["used"]
        mib = (told["memory_bytes"] or 0) >> 20
        # The context of one process grows while it loads its kernels: between the two listings.
        smi = sorted({listed.get(pid), again.get(pid)} - {None})
        right = bool(smi) and smi[0] <= mib <= smi[-1] and metrics.get(name) == told["memory_bytes"] and name in screen
        right = right and inside[name] == told["memory_bytes"] and name in paged
        in_page = paged.get(name, {"memory": "–", "busy": "–"})
        busy = shown_busy(mode, told)
        right = right and (busy is not None or machine.simulated)
        rows.hold(
            f"{mode}: {name}", f"{'–'.join(map(str, smi))} MiB, pmon sm {samples.get(pid, '–')}",
            f"status {mib} MiB, metrics {(metrics.get(name) or 0) >> 20} MiB, sublet-share {(inside[name] or 0) >> 20} MiB, "
            f"page {in_page['memory']}; SM {busy}, page {in_page['busy']}", right,
        )
    for device in status["devices"]:
        gpu = device["used"]
        rows.add(
            f"{mode}: GPU {device.get('index', '')}", "", f"busy {gpu['busy_percent']} %, {(gpu['memory_bytes'] or 0) >> 20} MiB, "
            f"{gpu['power_watts']} W; all looks in {took:.1f} s", INFO,
        )
    print(screen, flush=True)


def leases_now():
    return json.loads(process.must(["sublet", "status", "--format", "json"]))["leases"]


def shown_busy(mode, told):
    """A container's own figure, or its server's; None where the wrong one of them is there."""
    own, server = told["sm_percent"], told["server_sm_percent"]
    if mode == "shared MPS":
        return f"n/a of {server} %" if own is None and server is not None else None
    return f"{own} %" if own is not None and server is None else None


def by_nvidia_smi(machine):
    text = process.must([smi(machine), "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"])
    pairs = [line.split(",") for line in text.splitlines() if line.strip()]
    return {int(pid): int(mib) for pid, mib in pairs if mib.strip().isdigit()}


def pmon(machine):
    """`nvidia-smi pmon`: SM by pid."""
    if machine.simulated:
        return {}
    lines = process.must([smi(machine), "pmon", "-c", "1", "-s", "u"]).splitlines()
    words = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return {int(word[1]): word[3] for word in words if word[1].isdigit()}


def smi(machine):
    path = ":".join([*machine.given["program_directories"], "/srv/sim/usr/bin", "/usr/bin"])
    return shutil.which("nvidia-smi", path=path) or "nvidia-smi"


def by_metrics(text):
    found = re.findall(r'^sublet_container_memory_used_bytes\{container="([^"]+)"[^}]*\} (\S+)', text, re.M)
    return {name: int(float(value)) for name, value in found}


def own_share(machine, name):
    """What the container itself is told."""
    done = machine.docker.execute(name, ["/usr/bin/sublet-share", "--format", "json"], 20)
    told = engines.last_json(done.out)
    if told is None:
        raise Wrong(done.why())
    return told["used_bytes"]


def cost(rows, machine, mode, page):
    """CPU time of one look, and what the containers compute while `top` looks twice a second."""
    for command in (["status", "--format", "json"], ["metrics"], ["top", "--once"]):
        rows.add(f"{mode}: `sublet {command[0]}`", "", one_look(["sublet", *command]), INFO)
    used = page.cost(asked=True)
    time.sleep(6)
    idle = page.cost(asked=False)
    rows.add(f"{mode}: `sublet top --web`", "", f"{used:.1f} % of a CPU while asked twice a second, {idle:.1f} % while not", INFO)
    if machine.simulated:
        return
    alone = rate(machine)
    top = process.background(["script", "-qfec", "sublet top --interval 500ms", "/dev/null"], "/tmp/top.log")
    with_top = rate(machine)
    top.terminate()
    top.wait(10)
    rows.add(f"{mode}: multiplications a second, all seven", "", f"{alone:.0f} alone, {with_top:.0f} beside `sublet top --interval 500ms`", INFO)


def one_look(command, times=10):
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    for _ in range(times):
        process.must(command)
    after, took = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{took / times * 1e3:.0f} ms, {cpu / times * 1e3:.0f} ms of CPU time, mean of {times}"


def rate(machine, seconds=8):
    """The sum of the containers' means of the last seconds."""
    time.sleep(seconds)
    total = 0.0
    for name in NAMES:
        lines = [engines.last_json(line) for line in machine.docker.logs(name).splitlines()]
        rates = [line["per_second"] for line in lines if line and line.get("event") == "rate"][-(seconds - 2):]
        total += sum(rates) / max(len(rates), 1)
    return total
