"""The groups of checks, the most important first. Each function takes the machine and the group's number in the table."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import control, engines, leaders, process, shares
from .machine import report, workload
from .table import Rows, Skip, Wrong

# Workload, name, packages that must be installed on the host.
FRAMEWORKS = [
    ("torch_", "PyTorch", ["torch"]),
    ("jax_", "JAX", ["jax"]),
    ("cupy_", "CuPy", ["cupy"]),
    ("triton_", "Triton", ["torch", "triton"]),
    ("compile_", "torch.compile", ["torch", "triton"]),
    ("numba_", "Numba", ["numba"]),
    ("transformers_", "Transformers", ["torch", "transformers"]),
    ("flax_", "Flax", ["jax", "flax"]),
    ("cuda_python", "CUDA Python", ["cuda"]),
    ("onnxruntime_", "ONNX Runtime", ["onnxruntime", "onnx"]),
    ("tensorflow_", "TensorFlow", ["tensorflow"]),
]
TWO = "the host has one GPU"


def framework_jobs(table, group, machine, used, ask, at_once):
    """Calls `ask(rows, engine, command)` for each framework and engine, `at_once` of them at the same time."""
    jobs = []
    if machine.simulated:
        return Rows(table, group, 10).skip("frameworks", "the driver is simulated")
    for engine in used:
        for name, title, needs in FRAMEWORKS:
            rows = Rows(table, group, 10 + len(jobs), engine.name, title)
            missing = [need for need in needs if need not in machine.given["installed"]]
            if missing:
                rows.skip("all", f"{', '.join(missing)}: not installed on this host")
            else:
                command = lambda over, processes=1, name=name: workload(name, over, processes, machine.given["python"])
                jobs.append((rows, engine, command))
                continue
            jobs.append(None)
    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(ask, *job) for job in jobs if job]:
            done.result()


def share(table, group, machine):
    """The driver's view with each engine: the whole GPU, a share, processes without sublet's environment."""
    for job, engine in enumerate((machine.docker, machine.podman)):
        rows = Rows(table, group, job, engine.name, "driver API")

        def whole():
            found = report(engine.run({"gpu": "0", "mode": "time-slice", "wait": "30s"}, machine.probe()))["devices"]
            right = len(found) == 1 and found[0]["sm"] == machine.sms and found[0]["correct"]
            return shares.shown(found), right and found[0]["free_mib"] > machine.total_mib // 2

        rows.ask("time-slice: the whole GPU", "1 GPU, all SMs and memory", whole)
        part = {"gpu": "0", "sm": "25", "memory": f"{machine.memory_mib}MiB", "wait": "30s"}
        shares.by_run(rows, machine, engine, part, machine.probe, 25, machine.memory_mib)
        shares.by_exec_and_health(rows, machine, engine, part, machine.probe, 25, machine.memory_mib)
        bare(rows, machine, engine, part)
        turns = {"gpu": "0", "mode": "time-slice", "memory": part["memory"], "wait": "30s"}
        shares.by_run(rows, machine, engine, turns, machine.probe, 100, machine.memory_mib, what="time-slice with memory")
        rows.ask("sublet doctor --run", "no check fails", lambda: doctor(engine.name))
    tools(Rows(table, group, 8, "podman"), machine)
    left = machine.clear()
    Rows(table, group, 9).hold("after the group", "no lease", left or "no lease", not left)


def tools(rows, machine):
    """Checks that the image has what the frameworks need."""
    source = "printf '#include <stdio.h>\nint main(void){puts(\"compiled\");}' >/tmp/a.c && gcc -o /tmp/a /tmp/a.c && /tmp/a"

    def said(command):
        done = machine.podman.call("run", "--rm", *machine.podman.words({}, []), "img", *command)
        return done.out.strip() if done.ok else done.why(), done.ok

    rows.ask("the image: a C compiler", "compiled", lambda: said(["sh", "-c", source]))
    if machine.given["installed"]:
        modules = "import ctypes, ssl, sqlite3, lzma, bz2, sys; print(sys.version.split()[0], sys.prefix)"
        rows.ask("the image: the host's Python", "it starts", lambda: said([machine.given["python"], "-c", modules]))


def bare(rows, machine, engine, part):
    """exec with an empty environment: it reaches MPS by /tmp/nvidia-mps, and the server's default limits apply."""
    name = f"bare-{engine.name}"
    engine.start(name, part, ["sleep", "300"])
    words = machine.probe()
    path = {"python3": "/usr/bin/python3", "sh": "/usr/bin/sh"}[words[0]]
    command = ["env", "-i", "PATH=/usr/bin", path, *words[1:]]
    rows.ask("exec, env -i", shares.wanted(machine, 25, machine.memory_mib),
             lambda: shares.sees(machine, report(engine.execute(name, command)), 25, machine.memory_mib, 1))
    rows.ask("limits of the MPS daemon and its server", f"a service's: {SERVICE}", mps_limits)
    engine.remove(name)


SERVICE = "1024 open files, 8388608 bytes locked"


def mps_limits():
    """The daemon does not have the resource limits of the engine that started the container
    (src/cli/mps_daemons/detach.rs)."""
    found = []
    for of in Path("/proc").glob("[0-9]*"):
        try:
            name, limits = (of / "cmdline").read_text().split("\0")[0], (of / "limits").read_text()
        except OSError:
            continue
        if Path(name).name.startswith("nvidia-cuda-mps-"):
            soft = {line[:26].strip(): line[26:].split()[0] for line in limits.splitlines()}
            found.append(f"{soft['Max open files']} open files, {soft['Max locked memory']} bytes locked")
    return "; ".join(found), len(found) >= 2 and set(found) == {SERVICE}


def doctor(engine):
    done = process.run(["sublet", "doctor", "--run", engine], 90)
    lines = (done.out + done.err).splitlines()
    bad = [line for line in lines if re.match(r"\s*(fail|failed|FAIL|✗)", line)]
    return "; ".join(bad) or (lines[-1] if lines else ""), done.ok


def frameworks(table, group, machine):
    """Each framework by run, exec and health check with one GPU, beside a neighbour that fills its share."""
    percent, mib = 12.5, machine.memory_mib
    part = {"gpu": "0", "sm": str(percent), "memory": f"{mib}MiB", "wait": "60s"}
    machine.docker.start("filler", part, machine.hold(900, True, mib))

    def ask(rows, engine, command):
        shares.by_run(rows, machine, engine, part, command, percent, mib, what="run beside a full neighbour")
        shares.by_exec_and_health(rows, machine, engine, part, command, percent, mib)

    framework_jobs(table, group, machine, (machine.docker, machine.podman), ask, machine.at_once)

    def neighbour():
        said = machine.docker.logs("filler")
        fills = re.findall(r'"full", "mib": (\d+)', said) or re.findall(r'"mib":(\d+)', said)
        running = machine.docker.state("filler", ".State.Running") == "true"
        most = max(map(int, fills), default=0)
        return f"{len(fills)} times full, at most {most} MiB, {'runs' if running else said[-200:]}", running and 0 < most <= mib

    Rows(table, group, 900, "docker", "driver API").ask("the neighbour that fills its share", "runs, never above its share", neighbour)
    left = machine.clear()
    Rows(table, group, 999).hold("after the group", "no lease", left or "no lease", not left)


def processes(table, group, machine):
    """sublet.processes=2: each of two processes gets half."""
    mib = machine.memory_mib
    part = {"gpu": "0", "sm": "25", "memory": f"{2 * mib}MiB", "processes": "2", "wait": "60s"}

    def ask(rows, engine, command):
        both = lambda over: command(over, 2)
        shares.by_run(rows, machine, engine, part, both, 12.5, mib, 2, "two processes")

    for job, engine in enumerate((machine.docker, machine.podman)):
        ask(Rows(table, group, job, engine.name, "driver API"), engine, machine.probe)
    framework_jobs(table, group, machine, (machine.docker,), ask, min(3, machine.at_once))
    left = machine.clear()
    Rows(table, group, 999).hold("after the group", "no lease", left or "no lease", not left)


def two(table, group, machine):
    """Two GPUs in one share: every framework, every form of CUDA_VISIBLE_DEVICES, NCCL; and the placement of shares."""
    rows = Rows(table, group)
    if machine.count() < 2:
        for check in ("frameworks over two GPUs", "CUDA_VISIBLE_DEVICES in a share of two", "NCCL all-reduce", "placement"):
            rows.skip(check, TWO)
        return
    mib = machine.memory_mib
    part = {"gpu": "any:2", "sm": "25", "memory": f"{mib}MiB", "wait": "60s"}
    for job, engine in enumerate((machine.docker, machine.podman), 1):
        rows = Rows(table, group, job, engine.name, "driver API")
        shares.by_run(rows, machine, engine, part, machine.probe, 25, mib, 2, "two GPUs")
        rows.ask("CUDA_VISIBLE_DEVICES none; 1; 1,0; 0", f"each at most {mib} MiB", lambda: forms(machine, engine, part, mib))
        rows.framework = "PyTorch, NCCL"
        rows.ask("all-reduce, two GPUs, exclusive", "the right sum", lambda: nccl(machine, engine, {"gpu": "any:2", "mode": "exclusive", "wait": "60s"}), 30)
        rows.ask("all-reduce, two GPUs, MPS, 50 %", "the right sum", lambda: nccl(machine, engine, dict(part, sm="50")), 30)

    def ask(rows, engine, command):
        shares.by_run(rows, machine, engine, part, command, 25, mib, 2, "two GPUs")

    framework_jobs(table, group, machine, (machine.docker, machine.podman), ask, min(4, machine.at_once))
    placement(Rows(table, group, 900, "podman"), machine)
    left = machine.clear()
    Rows(table, group, 999).hold("after the group", "no lease", left or "no lease", not left)


def forms(machine, engine, part, mib):
    done = engine.run(part, machine.forms())
    seen = engines.last_json(done.out)
    if not seen:
        raise Wrong(done.why())
    counts = {"none": 2, "1": 1, "1,0": 2, "0": 1}
    if machine.simulated:
        lines = [engines.last_json(line) for line in done.out.splitlines()]
        seen = {form: [line] * line.get("count", 1) for form, line in zip(counts, lines)}
    right, words = True, []
    for form, devices in seen.items():
        free = [device["free_mib"] if isinstance(device, dict) else device for device in devices]
        words.append(f"{form}: {', '.join(map(str, free))} MiB")
        right &= len(devices) == counts[form]
        right &= all(isinstance(device, dict) and not machine.sees_share(device, 25, mib) for device in devices)
    return "; ".join(words), right


def nccl(machine, engine, part):
    if "torch" not in machine.given["installed"]:
        raise Skip("torch: not installed on this host")
    done = engine.run(part, [machine.given["python"], "/workloads/nccl.py"])
    seen = engines.last_json(done.out)
    if not seen:
        raise Wrong(done.why())
    return f"{'right' if seen['correct'] else 'wrong'}, {seen['gb_per_s']} GB/s", seen["correct"]


def placement(rows, machine):
    """binpack, spread and drain; and a container sees only its GPU."""
    podman, conf = machine.podman, Path("/etc/sublet/conf.d/placement.toml")
    part = {"sm": "20", "memory": "2GiB"}
    nodes = ["sh", "-c", "ls -d /dev/nvidia[0-9]* | wc -w; ls /proc/driver/nvidia/gpus/* 2>/dev/null | grep -c information"]

    def used(names):
        for name in names:
            started = podman.start(name, part, ["sleep", "300"])
            if not started.ok:
                raise Wrong(started.why())
        return len({lease["device"] for lease in machine.leases()})

    def by_policy(policy, expected):
        def look():
            conf.write_text(f'[placement]\npolicy = "{policy}"\n')
            try:
                devices = used([f"{policy}{number}" for number in range(4)])
                return f"{devices} devices", devices == expected
            finally:
                conf.unlink()
                podman.remove_all()
                machine.no_leases()
        return look

    rows.ask("four shares, binpack", "1 devices", by_policy("binpack", 1))
    most = min(4, machine.count())
    rows.ask("four shares, spread", f"{most} devices", by_policy("spread", most))

    def drained():
        process.must(["sublet", "drain", "0"])
        try:
            used(["drained"])
            device = machine.leases()[0]["device"]
            return device, device == machine.devices()[1]["uuid"]
        finally:
            process.must(["sublet", "undrain", "0"])
            podman.remove_all()
            machine.no_leases()

    rows.ask("drain 0", "the second GPU", drained)

    def own():
        done = podman.run(dict(part, gpu="1"), nodes)
        # The simulated driver has no /proc/driver/nvidia in containers.
        return " and ".join(done.out.split()), done.out.split() == ["1", "0" if machine.simulated else "1"]

    rows.ask("own node and /proc entry alone", "1 and 1", own)

    def after_cuda():
        opens = "for node in /dev/nvidia[0-9]*; do (exec 3<>$node) 2>/dev/null && echo $node; done | wc -l"
        script = f"python3 /workloads/driver.py >/dev/null 2>&1; ls -d /dev/nvidia[0-9]* | wc -w; {opens}"
        done = podman.run({"gpu": "0", "sm": "20"}, ["sh", "-c", script])
        there, opened = done.out.split()
        return f"{there} nodes, {opened} can be opened", opened == "1"

    if not machine.simulated:
        rows.ask("nodes once CUDA has started", "only its own can be opened", after_cuda)


def seven(table, group, machine):
    """Seven containers of Docker: one's containerd-shim is killed, one is killed by Docker, one restarts."""
    docker, rows = machine.docker, Rows(table, group, 0, "docker", "driver API")
    part = {"gpu": "0", "sm": "12", "memory": f"{min(machine.memory_mib, machine.total_mib // 12)}MiB", "wait": "30s"}
    names = [f"n{number}" for number in range(1, 8)]
    for name in names:
        started = docker.start(name, part, machine.hold(300), ["--restart=on-failure:3"])
        if not started.ok:
            return rows.hold("seven containers", "seven start", f"{name}: {started.why()}", False)
    process.eventually(lambda: all('"info"' in docker.logs(name) for name in names), 30)
    rows.ask("seven containers", "7 leases", lambda: (f"{len(machine.leases())} leases", len(machine.leases()) == 7))
    others = [name for name in names if name not in ("n3", "n5")]
    born = {name: docker.state(name, ".State.Pid") for name in others}

    def untouched():
        now = {name: docker.state(name, ".State.Pid") for name in others}
        ended = [name for name in others if '"end"' in docker.logs(name)]
        same = now == born and not ended
        return "5 processes as before" if same else f"before {born}, now {now}, ended {ended}", same

    def shim_killed():
        pid, identity = docker.state("n3", ".State.Pid"), docker.state("n3", ".Id")
        found = process.run(["pgrep", "-f", f"containerd-shim-runc.*{identity}"]).out.split()
        if not found:
            raise Wrong("no containerd-shim found")
        os.kill(int(found[0]), 9)
        # dockerd notices, ends the container's processes, and starts the container again.
        process.eventually(lambda: docker.state("n3", ".State.Pid") not in (pid, "0"), 20, 0.3)
        agree = lambda: len(machine.leases()) == 6 + (docker.state("n3", ".State.Running") == "true")
        right = process.eventually(agree, 10, 0.3)
        return f"n3 {docker.state('n3', '.State.Status')}, {len(machine.leases())} leases", right

    def killed():
        before = len(machine.leases())
        docker.call("kill", "n5")
        process.eventually(lambda: len(machine.leases()) == before - 1, 15)
        return f"n5 {docker.state('n5', '.State.Status')}, {len(machine.leases())} leases", len(machine.leases()) == before - 1

    def restarts():
        docker.remove("n5")
        docker.start("again", part, ["sh", "-c", "sleep 0.2; exit 3"], ["--restart=on-failure:2"])
        process.eventually(lambda: docker.state("again", ".State.Status") == "exited", 40, 0.3)
        count, leases = docker.state("again", ".RestartCount"), [lease["container_id"] for lease in machine.leases()]
        identity = docker.state("again", ".Id")
        return f"{count} restarts, {'a lease left' if identity in leases else 'no lease left'}", count == "2" and identity not in leases

    rows.ask("kill -9 of a containerd-shim", "a lease for each that runs", shim_killed)
    rows.ask("… its neighbours", "untouched", untouched)
    rows.ask("docker kill", "one lease fewer", killed)
    rows.ask("… its neighbours", "untouched", untouched)
    rows.ask("--restart=on-failure:2 of one that fails", "2 restarts, no lease left", restarts)
    rows.ask("… its neighbours", "untouched", untouched)
    left = machine.clear()
    rows.hold("docker rm -f of all", "no lease", left or "no lease", not left)


REFUSALS = [
    ("sublet.sm=200", {"sm": "200"}, [], "sublet.sm"),
    ("sublet.memory=9999GiB", {"memory": "9999GiB", "sm": "5"}, [], "memory|MiB"),
    ("sublet.memory=8, no unit", {"memory": "8"}, [], "sublet.memory"),
    ("sublet.vram=8GiB", {"vram": "8GiB"}, [], "sublet.memory"),
    ("Sublet.sm=25", {"Sublet.sm": "25"}, [], "sublet.sm"),
    ("sublet_sm=25", {"sublet_sm": "25"}, [], "sublet.sm"),
    ("sublet.mode=exclusive and sm", {"mode": "exclusive", "sm": "25"}, [], "sublet.sm|exclusive"),
    ("sublet.gpu=97", {"gpu": "97"}, [], "97"),
    ("--privileged", {"sm": "5"}, ["--privileged"], "privileged|allow-all|allow_privileged"),
]


def refusals(table, group, machine):
    """Requests that are refused, and the engine shows the reason."""
    for job, engine in enumerate((machine.docker, machine.podman)):
        rows = Rows(table, group, job, engine.name)
        for title, part, options, words in REFUSALS:

            def look():
                done = engine.run(part, ["true"], options, 60)
                said = done.out + done.err
                if done.ok:
                    return "it started", False
                if engine.name == "podman" and not re.search(words, said):
                    # Podman does not show the message of a precreate hook, so sublet keeps it.
                    said += process.run(["sublet", "status", "--last-error"]).out
                return reason(said, words)

            rows.ask(title, "refused by name", look)
    rows = Rows(table, group, 5, "docker")
    rows.ask("--gpus all beside a share", "refused", lambda: gpus(machine))
    left = machine.clear()
    Rows(table, group, 9).hold("after the group", "no lease", left or "no lease", not left)


def reason(said, words):
    """The line that gives the reason, without what engines say before it."""
    line = next((line for line in said.splitlines() if re.search(words, line)), said.strip()[-200:])
    line = re.sub(r"^.*?(sublet refuses|sublet-runtime: )", r"\1", re.sub(r"\b[0-9a-f]{64}\b", "…", line))
    return line[:300], bool(re.search(words, said))


def gpus(machine):
    done = machine.docker.run({"sm": "5"}, ["true"], ["--gpus", "all"])
    return done.why()[-200:], not done.ok


def cheats(table, group, machine):
    """The guard ends a container that tampers with its limit. Its neighbour goes on. Then what else may keep the MPS daemon."""
    for job, engine in enumerate((machine.docker, machine.podman)):
        cheating(Rows(table, group, job, engine.name, "driver API"), machine, engine)
    control.held(table, group, machine, 2)
    control.at_once(table, group, machine, 3)
    left = machine.clear()
    Rows(table, group, 9).hold("after the group", "no lease", left or "no lease", not left)


def cheating(rows, machine, engine, mib=4096):
    part = {"gpu": "0", "sm": "20", "memory": f"{mib}MiB", "wait": "30s"}
    neighbour, cheat = f"good{rows.job}", f"cheat{rows.job}"

    def look():
        beside = engine.start(neighbour, part, machine.hold(120))
        if not beside.ok:
            raise Wrong(f"no neighbour: {beside.why()}")
        if not process.eventually(lambda: '"info"' in engine.logs(neighbour), 30):
            raise Wrong(f"no neighbour: {engine.logs(neighbour)[-200:]}")
        start = time.monotonic()
        began = engine.start(cheat, part, machine.cheat(min(5 * mib, machine.total_mib * 8 // 10), 60))
        if not began.ok:
            raise Wrong(began.why())
        ended = process.eventually(lambda: engine.state(cheat, ".State.Status") == "exited", 20)
        seconds, said = time.monotonic() - start, engine.logs(cheat)
        took = '"took"' in said or '"CUDA_SUCCESS"' in said
        return f"{'took it' if took else said.strip()[-120:]}; {'ended' if ended else 'still there'} after {seconds:.1f} s", ended and took

    cheated = rows.ask(f"{5 * mib} MiB taken of {mib} by a spoilt limit", "ended by the guard", look, 40)

    def unharmed():
        running, said = engine.state(neighbour, ".State.Status"), engine.logs(neighbour)
        ended = '"end"' in said
        return f"{running}, {said[-150:] if ended else 'no error'}", running == "running" and not ended

    if cheated is None:
        rows.skip("… its neighbour", "time")
    else:
        rows.ask("… its neighbour", "runs, no error", unharmed)
    engine.remove(neighbour, cheat)


POLICY = """[[policy]]
user = "tester"
modes = ["mps", "time-slice"]
sm = 50
memory = "{}MiB"
leases = 3
"""


USER = {
    "XDG_RUNTIME_DIR": "/run/user/1000", "HOME": "/home/tester", "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "USER": "tester",
}
USERS_POLICY = Path("/etc/sublet/conf.d/policy.toml")


def users_podman(machine, policy):
    """A user's own Podman, with the image, under this policy, until `USERS_POLICY` is removed."""
    for directory in ("/run/user/1000", "/home/tester"):
        os.makedirs(directory, exist_ok=True)
        os.chown(directory, 1000, 1000)
    USERS_POLICY.write_text(policy)
    storage = Path("/home/tester/.config/containers/storage.conf")
    storage.parent.mkdir(parents=True, exist_ok=True)
    storage.write_text('[storage]\ndriver = "vfs"\n')
    process.must(["chown", "-R", "1000:1000", "/home/tester/.config"])
    machine.end_serve()
    machine.start_serve()
    engine = engines.rootless("tester", 1000, USER)
    engine.volumes = machine.podman.volumes
    if not engine.call("image", "exists", "img").ok:
        imported = engine.call("import", "--quiet", plain_image(machine), "img", timeout=180)
        if not imported.ok:
            raise Wrong(f"podman import: {imported.why()}")
    return engine


def rootless(table, group, machine):
    """A user's Podman with a policy: shares, each policy limit named in its refusal, the service killed, a cheat."""
    rows = Rows(table, group, 0, "podman, rootless", "driver API")
    mib = machine.memory_mib
    try:
        engine = users_podman(machine, POLICY.format(2 * mib))
    except Wrong as error:
        return rows.hold("podman import", "an image", error, False)
    part = {"sm": "25", "memory": f"{mib}MiB", "wait": "30s"}
    shares.by_run(rows, machine, engine, part, machine.probe, 25, mib)
    torch = Rows(table, group, 1, engine.name, "PyTorch")
    if "torch" in machine.given["installed"]:
        shares.by_run(torch, machine, engine, part, lambda over: workload("torch_", over, 1, machine.given["python"]), 25, mib)
    else:
        torch.skip("run", "simulated" if machine.simulated else "torch: not installed on this host")
    rows = Rows(table, group, 2, engine.name, "driver API")
    for title, request, words in [
        ("sm above the policy's 50", {"sm": "60", "memory": "1GiB"}, "sm|SM"),
        ("memory above the policy's", {"sm": "5", "memory": f"{3 * mib}MiB"}, "memory|MiB"),
        ("a mode that the policy lacks", {"mode": "exclusive"}, "exclusive"),
        ("no memory where the policy has some", {"sm": "25"}, "memory"),
    ]:
        rows.ask(title, "refused by name", lambda: capped(engine, request, words))
    rows.ask("exec", shares.wanted(machine, 25, mib), lambda: user_exec(machine, engine, part, mib))
    rows.ask("the service killed", "a new share is refused, a running container goes on; then healed", lambda: service_killed(machine, engine, part))
    cheating(Rows(table, group, 3, engine.name, "driver API"), machine, engine, min(2048, mib))
    leaders.each(Rows(table, group, 4, engine.name, "driver API"), machine, engine)
    engine.remove_all()
    left = machine.no_leases()
    Rows(table, group, 9, engine.name).hold("after the group", "no lease", left or "no lease", not left)
    USERS_POLICY.unlink()


def plain_image(machine):
    """The image without the compiler, because a user's storage is vfs, which copies it for each container."""
    leave = ["./usr/lib/gcc", "./usr/libexec", "./usr/include", "*.a"]
    process.must(["tar", "-C", "/img", *[f"--exclude={path}" for path in leave], "-cf", "/srv/plain.tar", "."])
    os.chmod("/srv/plain.tar", 0o644)
    return "/srv/plain.tar"


def by_user():
    """What stands before a command of that user's."""
    return ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", "env", "-i", *(f"{key}={value}" for key, value in USER.items())]


def capped(engine, request, words):
    done = engine.run(request, ["true"], timeout=60)
    said = done.out + done.err
    if not re.search(words, said):
        ask = [*by_user(), "sublet", "status", "--last-error"]
        said = process.run(ask).out
    return ("it started", False) if done.ok else reason(said, words)


def user_exec(machine, engine, part, mib):
    started = engine.start("user", part, ["sleep", "200"])
    try:
        if not started.ok:
            raise Wrong(started.why())
        return shares.sees(machine, report(engine.execute("user", machine.probe())), 25, mib, 1)
    finally:
        engine.remove("user")


def service_killed(machine, engine, part):
    engine.start("stays", part, ["sleep", "200"])
    machine.end_serve()
    try:
        refused = engine.run(dict(part, wait="0"), ["true"], timeout=60)
        still = report(engine.execute("stays", machine.probe()))["devices"]
    finally:
        machine.start_serve()
    healed = engine.run(part, ["true"], timeout=60)
    engine.remove("stays")
    seen = f"{'refused' if not refused.ok else 'started'}; {shares.shown(still)}; then {'a share' if healed.ok else healed.why()}"
    return seen, not refused.ok and healed.ok and bool(still)
