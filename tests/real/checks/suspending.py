"""`sublet suspend` and `resume` on one GPU (docs/suspend.md): what is out leaves the GPU and comes back as it was, what cannot be
suspended is refused and goes on, what is killed at any step is put right, and two take turns. Times beside the driver's own calls.

A part more is a function here and its name in `suspend`.
"""

import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import groups, kept, process
from .kept import ALLOW, WITHOUT_RIGHTS, Kept, ask, do, refused
from .table import Rows, Skip

POLICY = '[[policy]]\nuser = "tester"\nsuspend = true\n'


def suspend(table, group, machine):
    # A GPU has one use at a time.
    under_mps(Rows(table, group, 100, "docker", "driver API"), machine)
    begun = kept.begin_frameworks(table, group, machine)

    def frameworks(_, machine):
        kept.look_at_frameworks(begun, "suspend, resume", "on no GPU meanwhile; then the same results, bit by bit", out_and_back)

    parts = [life, others, cannot, limits, frameworks, cut_short, small_turns, large, speed, engine_killed, of_users]
    kept.group_of(table, group, machine, parts)


def turns(table, group, machine):
    """Two containers of half of the GPU's memory and more, ten turns each, as far as there is time for it."""
    kept.fast(machine)
    rows = Rows(table, group, 0, "docker", "driver API")
    take_turns(rows, machine, large_mib(machine, 2))
    left = machine.clear()
    rows.hold("after the group", "no lease", left or "no lease", not left)


def usual(machine):
    """MiB of most containers: large enough to be in the middle of something."""
    return 1024 if machine.simulated else 4096


def out_and_back(one):
    """Suspends and resumes it: what was seen, and whether it was right."""
    out = do("suspend", one.name)
    one.waits()
    meanwhile = one.gpus()
    back = do("resume", one.name, "--wait", "20s")
    one.goes_on()
    return f"{out['bytes'] >> 20} MiB, out {out['seconds']:.1f} s, back {back['seconds']:.1f} s; on GPUs {meanwhile} meanwhile", meanwhile == []


def under_mps(rows, machine):
    share = {"gpu": "0", "sm": "25", "wait": "30s"}

    def look():
        with kept.kept(machine, machine.docker, "mps", 256, share) as one:
            why = refused("cannot-suspend", "suspend", "mps", "--force")
            one.goes_on()
            return why, "MPS" in why

    rows.ask("under MPS", "refused, and it goes on", look, 15)


def life(rows, machine):
    engine, mib = machine.docker, usual(machine)
    with kept.kept(machine, engine, "first", mib, {**ALLOW, "memory": f"{machine.total_mib * 3 // 10}MiB"}) as one:

        def out():
            before, done = one.rss_mib(), do("suspend", "first")
            one.waits()
            after, gpus, state = one.rss_mib(), one.gpus(), one.state()
            seen = f"{done['bytes'] >> 20} MiB in {done['seconds']:.1f} s, {state}, on GPUs {gpus}; RSS {before} MiB, then {after} MiB"
            # The simulator copies no more than 128 MiB.
            grown = 100 if machine.simulated else mib * 9 // 10
            return seen, gpus == [] and state == "suspended" and after - before >= grown

        rows.ask("suspend", "on no GPU, it computes nothing, its RSS has grown by what was there", out)

        def taken():
            size = machine.total_mib * 8 // 10
            share = {**ALLOW, "memory": f"{size + 2048}MiB"}
            with kept.kept(machine, engine, "other", size, share) as other:
                why = refused("no-room", "resume", "first")
                state = one.state()
                other.goes_on()
            return f"{size} MiB taken; {why}", state == "suspended"

        rows.ask("… another takes 80 % of the GPU, and resume", "refused with its figures; suspended still", taken, 15)

        def back():
            done = do("resume", "first", "--wait", "20s")
            one.goes_on()
            return f"{done['seconds']:.1f} s, on GPUs {one.gpus()}", one.gpus() == [0]

        rows.ask("… resume", "it goes on with what it had, on GPU 0", back)

        def paused():
            engine.call("pause", "first")
            why = refused("paused", "suspend", "first")
            engine.call("unpause", "first")
            one.goes_on()
            return why, True

        rows.ask("docker pause, suspend", "refused; it goes on", paused)

        def meanwhile():
            do("suspend", "first")
            done = [engine.call("pause", "first"), engine.call("unpause", "first"), engine.execute("first", ["true"], 20)]
            do("resume", "first", "--wait", "20s")
            one.goes_on()
            return "; ".join("ok" if each.ok else each.why() for each in done), all(each.ok for each in done)

        rows.ask("while suspended: docker pause, unpause, exec", "they work, and it comes back", meanwhile, 15)

        def computing():
            do("suspend", "first")
            before = one.lease()["suspended_bytes"]
            with ThreadPoolExecutor(1) as pool:
                new = pool.submit(engine.execute, "first", machine.hold(20), 60)
                grown = process.eventually(lambda: one.lease()["suspended_bytes"] > before, 18, 0.3)
                do("resume", "first", "--wait", "20s")
                one.goes_on()
                done = new.result()
            return f"suspended, too: {grown}; exec ended with status {done.status}; {done.out.strip()[-80:]}", grown and done.ok

        rows.ask("while suspended: a process that computes, by exec", "suspended by the guard, and both come back", computing, 40)

        def restarted():
            before, lease = one.last()["n"], one.lease()["id"]
            do("suspend", "first")
            done = engine.call("restart", "--time=1", "first")
            again = process.eventually(lambda: (one.last() or {"n": before})["n"] < before, 60, 0.3)
            new = one.lease() or {"id": "none", "state": "none"}
            one.goes_on()
            return f"{'' if done.ok else done.why()} lease {new['state']}, {'it began anew' if again else 'it did not begin'}", done.ok and again and new["id"] != lease

        rows.ask("while suspended: docker restart", "a new lease; it begins anew", restarted, 20)

        def stopped():
            do("suspend", "first")
            done = engine.call("stop", "--time=1", "first")
            gone = process.eventually(lambda: one.lease() is None, 15, 0.3)
            return f"{'ok' if done.ok else done.why()}; {'no lease' if gone else one.state()}", done.ok and gone

        rows.ask("while suspended: docker stop", "no lease left", stopped, 15)

    def removed():
        one = Kept(machine, engine, "second", mib).ready()
        pid = one.pid()
        do("suspend", "second")
        one.remove()
        left = machine.leases()
        gone = process.eventually(lambda: not any(lease["pid"] == pid for lease in machine.leases()), 15, 0.3)
        return f"process {'there' if Path(f'/proc/{pid}').exists() else 'gone'}, {'no lease' if gone else left}", gone

    rows.ask("while suspended: docker rm --force", "nothing left", removed, 15)


def others(rows, machine):
    """Podman, and a container of uid 1000 without capabilities."""
    for engine, title, options in ((machine.podman, "Podman", []), (machine.docker, "uid 1000 without capabilities", WITHOUT_RIGHTS)):
        rows.engine = engine.name

        def look():
            with kept.kept(machine, engine, "other", usual(machine), options=options) as one:
                return out_and_back(one)

        rows.ask(f"{title}: suspend, resume", "on no GPU meanwhile; then it goes on with what it had", look, 20)


def cannot(rows, machine):
    engine = machine.docker

    def never():
        with kept.kept(machine, engine, "never", 512, {"gpu": "0", "mode": "time-slice"}) as one:
            why = refused("suspend-not-allowed", "suspend", "never")
            one.goes_on()
            do("suspend", "never", "--force")
            do("resume", "never")
            one.goes_on()
            return why, True

    rows.ask("without sublet.suspend", "refused; root does it with --force", never, 15)

    def managed():
        with kept.kept(machine, engine, "managed", 512, command=kept.keep(machine, 512, "managed")) as one:
            why = refused("suspend-undone", "suspend", "managed")
            one.goes_on()
            return f"{why}; {one.state()}", "CUDA_ERROR_NOT_SUPPORTED" in why and one.state() == "active"

    rows.ask("managed memory", "CUDA_ERROR_NOT_SUPPORTED, and it goes on", managed, 15)

    def several():
        words = " ".join(machine.hold(600))
        command = ["sh", "-c", f"{words} >/dev/null & exec {' '.join(kept.keep(machine, 512))}"]
        with kept.kept(machine, engine, "several", 512, command=command) as one:
            one.has_processes(2)
            why = refused("several-processes", "suspend", "several")
            one.goes_on()
        with kept.kept(machine, engine, "many", 512, {**ALLOW, "suspend": "allow-many"}, command=command) as one:
            one.has_processes(2)
            seen, right = out_and_back(one)
            return f"{why}; {seen}", right

    rows.ask("two processes", "refused; with allow-many both go out and come back", several, 20)

    def twice():
        with kept.kept(machine, engine, "twice", usual(machine)) as one:
            with ThreadPoolExecutor(2) as pool:
                said = list(pool.map(lambda _: ask("suspend", "twice"), range(2)))
            reasons = sorted(each.get("reason", "done") for each in said)
            do("resume", "twice")
            one.goes_on()
            return ", ".join(reasons), "done" in reasons and set(reasons) <= {"busy", "done", "suspended"} and reasons.count("done") == 1

    rows.ask("suspend twice at once", "one does it, the other is refused", twice, 15)


def limits(rows, machine):
    """Host memory that has no room for the copy."""
    engine, mib = machine.docker, usual(machine)

    def cgroup():
        if process.run(["docker", "info", "--format", "{{.MemoryLimit}}"]).out.strip() != "true":
            raise Skip("Docker has no memory limits here")
        with kept.kept(machine, engine, "small", mib, options=[f"--memory={mib * 3 // 4}m"]) as one:
            why = refused("no-host-memory", "suspend", "small")
            one.goes_on()
            return why, "memory limit" in why

    rows.ask("docker run --memory is too small", "refused with its figures, and it goes on", cgroup, 15)

    def host():
        with kept.kept(machine, engine, "large", mib) as one:
            why = refused("no-host-memory", "suspend", "large", before=with_little_memory(mib // 2))
            one.goes_on()
            return why, "the host" in why

    rows.ask("the host's memory is too small", "refused with its figures, and it goes on", host, 15)


def with_little_memory(mib):
    """What stands before a command that sees so little of the host's memory available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    little = f"MemAvailable: {mib << 10} kB"
    text = "\n".join(little if line.startswith("MemAvailable") else line for line in lines)
    Path("/tmp/meminfo").write_text(text + "\n")
    return ["unshare", "--mount", "sh", "-c", 'mount --bind /tmp/meminfo /proc/meminfo && exec "$@"', "sh"]


def settled(one):
    """Its state once what was cut short has been put right, by the next command or the service."""
    process.eventually(lambda: one.state() in ("active", "suspended", "no lease"), 40, 0.3)
    return one.state()


def cut_short(rows, machine):
    mib = usual(machine)
    with kept.kept(machine, machine.docker, "killed", mib) as one:
        for verb, rate in (("suspend", 0.45), ("resume", 0.2)):
            for with_child in (False, True):

                def look():
                    seen = []
                    for seconds in kept.steps(machine, mib, rate):
                        if verb == "resume":
                            do("suspend", "killed")
                        ended = kept.killed([verb, "killed"], seconds, with_child)
                        state = settled(one)
                        seen.append(f"{seconds:.2f} s{' (had ended)' if ended else ''}: {state}")
                        if state == "suspended":
                            do("resume", "killed")
                        one.goes_on()
                    return "; ".join(seen) + f"; on GPUs {one.gpus()}", one.gpus() == [0]

                title = f"kill -9 of {verb}{' and of its child' if with_child else ''}, at several steps"
                rows.ask(title, "put right by the next command; it goes on with what it had", look, 20)

    def container():
        one = Kept(machine, machine.docker, "ends", mib).ready()
        pid, null = one.pid(), subprocess.DEVNULL
        command = subprocess.Popen(["sublet", "suspend", "ends"], stdin=null, stdout=null, stderr=null)
        time.sleep(kept.steps(machine, mib, 0.45)[1])
        process.must(["kill", "-KILL", str(pid)])
        status = command.wait(60)
        gone = process.eventually(lambda: one.lease() is None, 20, 0.3)
        left = process.eventually(lambda: not kept.on_gpus(machine, pid), 10, 0.3)
        one.remove()
        return f"the command: status {status}; {'no lease' if gone else one.state()}; {'on no GPU' if left else 'on a GPU'}", gone and left

    rows.ask("kill -9 of the container's process in the middle of it", "no lease, nothing on the GPU", container, 20)


def engine_killed(rows, machine):
    """Docker is killed while the driver copies. Started again, it ends what ran, or goes on with it."""
    mib = usual(machine)
    one = Kept(machine, machine.docker, "docked", mib).ready()

    def look():
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(ask, "suspend", "docked")
            time.sleep(kept.steps(machine, mib, 0.45)[1])
            machine.daemon.send_signal(signal.SIGKILL)
            machine.daemon.wait()
            said = done.result()
        machine.start_dockerd()
        # It looks after its containers before it answers, or soon behind that.
        process.eventually(lambda: one.engine.state("docked", ".State.Running") == "false", 10, 0.3)
        runs = one.engine.state("docked", ".State.Running") == "true"
        seen = f"suspend: {said.get('reason', 'done')}; Docker says {'it runs' if runs else 'it ended'}"
        if runs:
            do("resume", "docked")
            one.goes_on()
            return f"{seen}; it goes on", True
        gone = process.eventually(lambda: not machine.leases(), 20, 0.3)
        return f"{seen}; {'no lease' if gone else machine.leases()}", gone

    rows.ask("kill -9 of dockerd in the middle of suspend", "it ends with its lease, or comes back", look, 30)
    one.remove()


def small_turns(rows, machine):
    take_turns(rows, machine, 1024)


def take_turns(rows, machine, mib, count=10):
    """Two containers that book 60 % of the GPU each."""
    share = {**ALLOW, "memory": f"{max(machine.total_mib * 6 // 10, mib + 1024)}MiB"}
    pair = []

    def look():
        for name in ("one", "two"):
            if pair:
                do("suspend", pair[0].name)
            pair.append(Kept(machine, machine.docker, name, mib, share).ready())
        begun, done, longest = time.monotonic(), 0, 0.0
        resting, working = pair
        while done < 2 * count and rows.table.clock.left() > 15 + 2 * longest:
            start = time.monotonic()
            do("suspend", working.name)
            do("resume", resting.name, "--wait", "30s")
            resting.goes_on()
            resting, working, done = working, resting, done + 1
            longest = max(longest, time.monotonic() - start)
        do("suspend", working.name)
        do("resume", resting.name, "--wait", "30s")
        resting.goes_on()
        mean = (time.monotonic() - begun) / max(done, 1)
        return f"{done // 2} turns each of {mib} MiB, {mean:.1f} s a turn, {longest:.1f} s at most; both right, none lost", done >= min(2 * count, 2)

    rows.ask(f"two containers that book {share['memory']} each, {count} turns each", "the results of both stay right, none is lost", look, 40)
    for one in pair:
        one.remove()


def large_mib(machine, count=1):
    """More than half of the GPU, if the host has memory for `count` copies of that."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    available = int(line.split()[1]) >> 10
    room = max(available - 16384, available * 4 // 10) // count
    return min(machine.total_mib * 55 // 100, room)


def large(rows, machine):
    mib = large_mib(machine)

    def look():
        with kept.kept(machine, machine.docker, "large", mib) as one:
            before, out = one.rss_mib(), do("suspend", "large")
            one.waits()
            after, back = one.rss_mib(), do("resume", "large", "--wait", "20s")
            one.goes_on()
            rates = [f"{done['seconds']:.1f} s, {done['bytes'] / 2**30 / done['seconds']:.2f} GiB/s" for done in (out, back)]
            return f"{out['bytes'] >> 20} MiB: out {rates[0]}; back {rates[1]}; RSS {before}, then {after} MiB", one.gpus() == [0]

    rows.ask("more than half of the GPU's memory", "it goes on with what it had", look, 60)


def speed(rows, machine):
    """In turns: by the product, and by tests/gpu/checkpoint.c on the same process."""
    mib = usual(machine) * 2
    ours, theirs = ([], []), ([], [])

    def look():
        with kept.kept(machine, machine.docker, "timed", mib) as one:
            for _ in range(3):
                ours[0].append(do("suspend", "timed")["seconds"])
                ours[1].append(do("resume", "timed")["seconds"])
                theirs[0].append(kept.by_hand(machine, "suspend", one.pid())["out_s"])
                theirs[1].append(kept.by_hand(machine, "resume", one.pid())["back_s"])
                one.goes_on()
        return f"{mib} MiB, three times each", True

    if rows.ask("by the product and by hand in turns", "it goes on with what it had, each time", look, 45):
        for title, product, hand in zip(("out", "back"), ours, theirs):
            kept.compare(rows, f"… {title}", mib, product, hand, not machine.simulated)


def of_users(rows, machine):
    """A user's own Podman: `sublet serve` does it, and is killed in the middle of it."""
    rows.engine, mib = "podman, rootless", usual(machine)
    engine = groups.users_podman(machine, POLICY)
    before = groups.by_user()
    try:
        one = Kept(machine, engine, "mine", mib).ready()

        def look():
            out = do("suspend", "mine", before=before)
            one.waits()
            gpus, back = one.gpus(), do("resume", "mine", before=before)
            one.goes_on()
            return f"out {out['seconds']:.1f} s, back {back['seconds']:.1f} s; on GPUs {gpus} meanwhile", gpus == []

        rows.ask("suspend, resume, by the user", "on no GPU meanwhile; then it goes on with what it had", look, 20)
        for verb, rate in (("suspend", 0.45), ("resume", 0.2)):
            rows.ask(f"kill -9 of the service in the middle of {verb}", "put right by the next one; it goes on", lambda: service_killed(machine, one, [verb, "mine"], kept.steps(machine, mib, rate)[1]), 25)
    finally:
        engine.remove_all()
        groups.USERS_POLICY.unlink(missing_ok=True)


def service_killed(machine, one, words, seconds):
    before, null = groups.by_user(), subprocess.DEVNULL
    if words[0] == "resume" and one.state() == "active":
        do("suspend", one.name, before=before)
    command = subprocess.Popen([*before, "sublet", *words], stdin=null, stdout=null, stderr=null)
    time.sleep(seconds)
    machine.end_serve()
    status = command.wait(60)
    machine.start_serve()
    state = settled(one)
    if state == "suspended":
        do("resume", one.name, before=before)
    one.goes_on()
    return f"the command: status {status}; then {state}; on GPUs {one.gpus()}", len(one.gpus()) == 1
