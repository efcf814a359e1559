"""Containers that keep what they wrote in GPU memory and check it without end, and what `sublet suspend`, `resume` and `move` do
with them. Groups `suspend` and `move` are made of these."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

from . import engines, process, used
from .table import INFO, Rows, Skip, Wrong

FRAMEWORKS = [
    ("torch", "PyTorch", ["torch"]),
    ("graph", "CUDA graph", ["torch"]),
    ("compile", "torch.compile", ["torch", "triton"]),
    ("jax", "JAX", ["jax"]),
    ("cupy", "CuPy", ["cupy"]),
    ("transformers", "Transformers", ["torch", "transformers"]),
    ("onnxruntime", "ONNX Runtime", ["onnxruntime", "onnx"]),
    ("processes", "torch.multiprocessing", ["torch"]),
    ("ffmpeg", "FFmpeg (PyAV), NVDEC", ["av"]),
]
ALLOW = {"gpu": "0", "mode": "time-slice", "suspend": "allow", "wait": "30s"}
# uid 1000 without any capability.
WITHOUT_RIGHTS = ["--user=1000:1000", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
LEDGER = Path("/run/sublet/ledger.json")
CHECKPOINT = Path("/usr/local/bin/checkpoint")
PACE = Path("/srv/sim/sim/checkpoint-pace")


class Kept:
    """A container that checks all of its GPU memory without a pause, or computes the same with a framework."""

    def __init__(self, machine, engine, name, mib, share=None, options=(), command=None):
        self.machine, self.engine, self.name, self.mib = machine, engine, name, mib
        self.words = (name, share or ALLOW, command or keep(machine, mib), options)
        self.started = engine.start(*self.words)
        # The last that it told before it was suspended first.
        self.out_at = None

    def ready(self, seconds=60):
        """Waits until it computes."""
        if not self.started.ok:
            raise Wrong(self.started.why())
        ended = lambda: self.engine.state(self.name, ".State.Status") == "exited"
        process.eventually(lambda: self.last() or ended(), seconds, 0.3)
        if self.last():
            return self
        if '"skipped"' in self.said():
            raise Skip(engines.last_json(self.said())["skipped"])
        raise Wrong(f"{self.name} does not compute: {self.engine.logs(self.name)[-300:]}")

    def said(self):
        return self.engine.call("logs", "--tail", "4", self.name).out

    def last(self):
        """The last line about what it computed; None before there is one."""
        lines = [engines.last_json(line) for line in self.said().splitlines()]
        return next((line for line in reversed(lines) if line and line.get("event") == "round"), None)

    def goes_on(self):
        """Computes, with what it had. Raises `Wrong` if it does not."""
        before = self.last() or {"n": 0}
        later = lambda: (self.last() or before)["n"] > before["n"]
        if not process.eventually(later, 20):
            raise Wrong(f"{self.name} hangs: {self.said()[-200:]}")
        last = self.last()
        if not last["equal"]:
            raise why_changed(self.name, last, self.out_at)

    def again(self):
        """It computes on its GPU, whatever an earlier row has left: it is resumed, or begun anew."""
        if self.engine.state(self.name, ".State.Status") == "paused":
            self.engine.call("unpause", self.name)
        if settled(self) == "suspended":
            ask("resume", self.name)
        before = self.last()
        if self.state() != "active" or not process.eventually(lambda: self.last() != before, 5):
            self.remove()
            self.started = self.engine.start(*self.words)
            self.ready()

    def waits(self):
        """Computes nothing. Raises `Wrong` if it does."""
        before = self.last()["n"]
        self.out_at = before if self.out_at is None else self.out_at
        time.sleep(0.5)
        if self.last()["n"] != before:
            raise Wrong(f"{self.name} computes")

    def pid(self):
        return int(self.engine.state(self.name, ".State.Pid"))

    def runs(self):
        return self.engine.state(self.name, ".State.Running") == "true"

    def lease(self):
        """Its lease, after anything that was cut short has been put right; None: it has none."""
        identity = self.engine.state(self.name, ".Id")
        return next((lease for lease in self.machine.leases() if lease["container_id"] == identity), None)

    def has_processes(self, count):
        """Waits until so many of its processes use the GPU."""
        if not process.eventually(lambda: ((self.lease() or {}).get("used") or {}).get("processes") == count, 40, 0.3):
            raise Wrong(f"{self.name} has not {count} CUDA processes: {self.lease()}")

    def state(self):
        lease = self.lease()
        return lease["state"] if lease else "no lease"

    def step(self):
        """The step that the ledger has of it. A command would put right what was cut short."""
        identity = self.engine.state(self.name, ".Id")
        return lambda: next(
            ((lease.get("suspension") or {}).get("step") for lease in json.loads(LEDGER.read_text())["leases"] if lease["container"]["id"] == identity), None
        )

    def gpus(self):
        """Indices of the GPUs on which nvidia-smi lists its first process."""
        return on_gpus(self.machine, self.pid())

    def nodes(self):
        """The GPUs' nodes that it has. The driver makes more where the process may, which the device cgroup keeps closed; behind
        those of the simulated driver is nothing that could be opened."""
        test = "[ -c $node ]" if self.machine.simulated else "(exec 3<>$node) 2>/dev/null"
        script = f"for node in /dev/nvidia[0-9]*; do {test} && echo $node; done; true"
        done = self.engine.execute(self.name, ["sh", "-c", script], 20)
        return done.out.split() if done.ok else [done.why()]

    def rss_mib(self):
        status = Path(f"/proc/{self.pid()}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) >> 10

    def remove(self):
        self.engine.remove(self.name)


def why_changed(name, last, out_at):
    """What is raised where it computed something else than at first. A result that changes without a suspension says nothing."""
    changed = last.get("changed")
    if not changed:
        return Wrong(f"the memory of {name} has changed")
    text = (f"{changed['differ']} of {changed['of']} results differ in round {changed['round']} of {last['n']}, in {changed['rounds']} rounds "
            f"until now; the longest round until the first of them took {changed['longest_s']} s")
    # During each suspension `waits` alone takes longer.
    if changed["longest_s"] < 0.4 or changed["round"] <= (out_at or 0):
        return Skip(f"by itself, before it was suspended: {text}")
    return Wrong(f"the results of {name} have changed after it was suspended: {text}")


def keep(machine, mib, *more, seconds=900):
    """The command of such a container."""
    program = ["cuda-probe", "keep"] if machine.simulated else ["python3", "/workloads/keep.py"]
    return [*program, str(mib), str(seconds), *more]


@contextlib.contextmanager
def kept(machine, engine, name, mib, share=None, options=(), command=None):
    one = Kept(machine, engine, name, mib, share, options, command)
    try:
        yield one.ready()
    finally:
        one.remove()


def ask(*words, timeout=150, before=()):
    """What a sublet command says in JSON: what was done, or its error with a `reason`."""
    done = process.run([*before, "sublet", *words, "--format", "json"], timeout)
    try:
        said = json.loads(done.out)
    except ValueError:
        raise Wrong(f"sublet {' '.join(words)}: {done.why()}") from None
    return said[0] if done.ok else said


def do(*words, **options):
    """`ask` of what must succeed."""
    said = ask(*words, **options)
    if "reason" in said:
        raise Wrong(f"sublet {' '.join(words)}: {said['error']}")
    return said


def refused(reason, *words, **options):
    """The words of a refusal for this reason."""
    said = ask(*words, **options)
    if said.get("reason") != reason:
        raise Wrong(f"sublet {' '.join(words)}: {said.get('reason', 'done')}: {said.get('error', '')}")
    return said["error"]


def on_gpus(machine, pid):
    """Indices of the GPUs on which nvidia-smi says that it has memory."""
    if machine.simulated:
        return [index for index in range(machine.count()) if with_memory(machine, "pid", ["-i", str(index)]).get(str(pid))]
    numbers = {device["uuid"]: index for index, device in enumerate(machine.devices())}
    return sorted(numbers[uuid] for (uuid, its), mib in with_memory(machine, "gpu_uuid,pid").items() if its == str(pid) and mib)


def with_memory(machine, about, options=()):
    """MiB by what nvidia-smi is asked about."""
    words = [*options, f"--query-compute-apps={about},used_memory", "--format=csv,noheader,nounits"]
    lines = [line.split(", ") for line in process.must([used.smi(machine), *words]).splitlines() if "," in line]
    return {line[0] if len(line) == 2 else tuple(line[:-1]): int(line[-1]) if line[-1].strip().isdigit() else 0 for line in lines}


def fast(machine):
    """The simulated driver takes a twentieth of the real one's times."""
    if machine.simulated:
        PACE.write_text("5\n")


def group_of(table, group, machine, parts):
    """Runs the parts of a group, one after the other: each gets its rows, and removes what it started."""
    fast(machine)
    build_by_hand(machine)
    for job, part in enumerate(parts):
        print(f"== {part.__name__}: {table.clock.left():.0f} s left", file=sys.stderr, flush=True)
        rows = Rows(table, group, job, "docker", "driver API")
        if table.clock.left() < 15:
            rows.skip(part.__name__, "time")
            continue
        try:
            part(rows, machine)
        except Exception as error:
            traceback.print_exc()
            rows.hold(part.__name__, "it ends", f"{type(error).__name__}: {error}"[-400:], False)
    left = machine.clear()
    Rows(table, group, 900).hold("after the group", "no lease", left or "no lease", not left)


# --- Killed at any step --------------------------------------------------------------------------------------------


def at_step(one, name, seconds, command):
    """Waits until the ledger has this step of it, and then so long. The step that it is in then; no name: no wait for one."""
    step = one.step()
    if name:
        process.eventually(lambda: step() == name or command.poll() is not None, 15, 0.003)
    time.sleep(seconds)
    return step() or "active"


def killed(one, words, step, with_child=True, before=()):
    """Runs a sublet command and ends it with SIGKILL at this step, with the child that asks the driver or without. The step in
    which it was then."""
    null = subprocess.DEVNULL
    command = subprocess.Popen([*before, "sublet", *words], stdin=null, stdout=null, stderr=null, start_new_session=True)
    was = at_step(one, *step, command)
    if command.poll() is not None:
        was = f"{was}, had ended"
    if with_child:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
    command.kill()
    command.wait()
    return was


def middle(machine, mib, name):
    """The middle of a copy of so many MiB: the ledger's step, and seconds after its beginning (FACTS: for a GiB 0.45 out, 0.2 in)."""
    rate = {"suspending": 0.45, "resuming": 0.2}[name] * (0.05 if machine.simulated else 1)
    return name, rate * mib / 1024 / 2


def steps(machine, mib, *names):
    """Where a command is killed: while it checks, and in the middle of these steps."""
    return [("", 0.05), *(middle(machine, mib, name) for name in names)]


def settled(one):
    """Its state once what was cut short has been put right, by the next command or the service."""
    process.eventually(lambda: one.state() in ("active", "suspended", "no lease"), 40, 0.3)
    return one.state()


# --- Frameworks ----------------------------------------------------------------------------------------------------


def begin_frameworks(table, group, machine, wanted=None):
    """Starts a container for each framework that this host has. They are looked at when others were: they take long to begin."""
    begun = []
    for job, (name, title, needs) in enumerate(FRAMEWORKS):
        if wanted and name not in wanted:
            continue
        rows = Rows(table, group, 800 + job, "docker", title)
        missing = [need for need in needs if need not in machine.given["installed"]]
        if machine.simulated or missing:
            rows.skip("all", "the driver is simulated" if machine.simulated else f"{', '.join(missing)}: not installed on this host")
            continue
        command = [machine.given["python"], "/workloads/steps.py", name, "900"]
        share = {**ALLOW, "suspend": "allow" if name == "processes" else "allow-many", **({"capabilities": "compute,utility,video"} if name == "ffmpeg" else {})}
        begun.append((rows, Kept(machine, machine.docker, f"with-{name}", 0, share, command=command)))
    return begun


def look_at_frameworks(begun, title, expected, look):
    for rows, one in begun:
        rows.ask(title, expected, lambda: look(one.ready(30)), 10)
        one.remove()


# --- By hand -------------------------------------------------------------------------------------------------------


def build_by_hand(machine):
    """Compiles tests/gpu/checkpoint.c, with this root's compiler."""
    if not CHECKPOINT.exists():
        CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
        process.must(["gcc", "-O2", "-Wall", "-o", str(CHECKPOINT), str(machine.checkout / "tests/gpu/checkpoint.c")])


def by_hand(machine, *words):
    """Seconds out and back by the driver's own calls, and `seconds` for the whole program."""
    environment = dict(os.environ)
    if machine.simulated:
        environment["LD_LIBRARY_PATH"] = f"/srv/sim/usr/lib/{os.uname().machine}-linux-gnu"
    began = time.monotonic()
    done = process.run([str(CHECKPOINT), *map(str, words)], 150, env=environment)
    seconds, said = time.monotonic() - began, engines.last_json(done.out)
    if not done.ok or said is None:
        raise Wrong(f"by hand: {done.out} {done.why()}")
    return {**said, "seconds": seconds}


SMALL_MIB = 1024


def compare(rows, way, large, small, judged):
    """Rows for one way; `large` and `small` are (MiB, seconds by the product, by hand), in pairs.

    What the product adds is fixed, and large copies scatter by more than that: it is judged on small ones, which do not, against 5 % of
    the time that the large take by hand. The large are judged by the pairs, because what slows one time slows the next, too; they fail
    where the lower end of what the median may be (in 95 of 100 runs of twelve) is above 5 %.
    """
    mib, product, hand = large
    ours, theirs = statistics.median(product), statistics.median(hand)
    ratios = sorted(mine / other for mine, other in zip(product, hand))
    outside = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
    low, middle, high = ((ratio - 1) * 100 for ratio in (ratios[outside], statistics.median(ratios), ratios[-1 - outside]))
    gib = mib / 1024
    seen = (f"{ours:.2f} s, {gib / ours:.2f} GiB/s; by hand {theirs:.2f} s, {gib / theirs:.2f} GiB/s; {middle:+.1f} % by {len(ratios)} pairs "
            f"({low:+.1f} to {high:+.1f}); all: {listed(product)} / {listed(hand)}")
    hold = rows.hold if judged else lambda title, _, seen, __: rows.add(title, "", seen, INFO)
    hold(f"… {way}", "at most 5 % slower than the program by hand", seen, low <= 5)
    few, product, hand = small
    added = statistics.median(mine - other for mine, other in zip(product, hand))
    seen = f"{added:+.2f} s, {added / theirs * 100:+.1f} % of {theirs:.2f} s; all: {listed(product)} / {listed(hand)}"
    hold(f"… {way}: what sublet adds, by {len(hand)} pairs of {few} MiB", f"at most 5 % of what {mib} MiB take by hand", seen, added <= theirs * 0.05)
    for mib, product, hand in (large, small):
        write_numbers(rows, way, mib, sublet=product, hand=hand)


def listed(times):
    return ", ".join(f"{one:.2f}" for one in times)


def write_numbers(rows, what, mib, **seconds):
    """For a plot (tests/real/plot): a JSON line, which tests/real/run brings out beside the table."""
    with open(Path(rows.table.path).with_name("numbers"), "a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what.strip("… "), "mib": mib, **{who: [round(one, 3) for one in all] for who, all in seconds.items()}}) + "\n")
