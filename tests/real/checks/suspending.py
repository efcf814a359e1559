"""`sublet suspend` and `resume` on one GPU (docs/suspend.md): what is out leaves the GPU and comes back as it was, what cannot be
suspended is refused and goes on, what is killed at any step is put right, and two take turns. `speed`: times beside the driver's own
calls.

A part more is a function here and its name in `suspend`. Where the time is short, the last ones are skipped.
"""

import contextlib
import json
import signal
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import groups, kept, process
from .kept import ALLOW, WITHOUT_RIGHTS, Kept, ask, do, refused, settled
from .table import Rows, Skip

POLICY = '[[policy]]\nuser = "tester"\nsuspend = true\n'


def suspend(table, group, machine):
    # A GPU has one use at a time.
    under_mps(Rows(table, group, 100, "docker", "driver API"), machine)
    begun = kept.begin_frameworks(table, group, machine)

    refusals = {"with-ffmpeg": decodes, "with-processes": has_memory_in_common}

    def frameworks(_, machine):
        computing = [pair for pair in begun if pair[1].name not in refusals]
        kept.look_at_frameworks(computing, "suspend, resume", "on no GPU meanwhile; then the same results, bit by bit", out_and_back)
        for rows, one in begun:
            if one.name in refusals:
                refusals[one.name](rows, machine, one)
                one.remove()

    parts = [life, cannot, frameworks, cut_short, on_demand, others, limits, of_users, engine_killed, small_turns]
    kept.group_of(table, group, machine, parts)


def turns(table, group, machine):
    """Two containers with 50 GiB each, ten turns each, as far as there is time for it, where 80 GiB of the GPU are left: a third has
    what a larger one has beyond, and computes in it."""
    kept.fast(machine)
    rows = Rows(table, group, 0, "docker", "driver API")
    beyond = max(machine.total_mib - (80 << 10), 0)
    room = machine.total_mib - beyond
    # 50 GiB take some 30 s out and back: twenty turns take 600 s.
    mib = min(large_mib(machine, 61, 2), room * 61 // 100, 50 << 10)
    # A context takes some 600 MiB.
    share = {"gpu": "0", "mode": "time-slice", "memory": f"{beyond}MiB", "wait": "30s"}
    third = kept.kept(machine, machine.docker, "beyond", beyond - 1024, share) if beyond > 2048 else contextlib.nullcontext()
    with third as one:
        take_turns(rows, machine, mib, room * 65 // 100)
        if one:
            one.goes_on()
    left = machine.clear()
    rows.hold("after the group", "no lease", left or "no lease", not left)


def usual(machine):
    """MiB of most containers: large enough to be in the middle of something."""
    return 1024 if machine.simulated else 2048


def out_and_back(one):
    """Suspends and resumes it: what was seen, and whether it was right."""
    out = do("suspend", one.name)
    one.waits()
    meanwhile = one.gpus()
    back = do("resume", one.name, "--wait", "20s")
    one.goes_on()
    return f"{out['bytes'] >> 20} MiB, out {out['seconds']:.1f} s, back {back['seconds']:.1f} s; on GPUs {meanwhile} meanwhile", meanwhile == []


def decodes(rows, machine, one):
    """A decoder on the GPU, which the driver does not bring back: the product refuses, and the driver's own calls show why."""

    def look():
        why = refused("cannot-suspend", "suspend", one.ready(30).name)
        one.goes_on()
        return why, True

    def look_by_hand():
        for verb in ("suspend", "resume"):
            kept.by_hand(machine, verb, one.pid())
        try:
            one.goes_on()
            return "its pictures are what they were", True
        except kept.Wrong as changed:
            return str(changed), True

    if rows.ask("suspend", "refused; it goes on with what it had", look, 10):
        rows.ask("… the driver's own calls", "why it is refused", look_by_hand, 30)


def has_memory_in_common(rows, _, one):
    """Of two processes with memory of each other's the driver could not bring back the second (docs/suspend.md)."""

    def look():
        one.ready(60).has_processes(2)
        why = refused("several-processes", "suspend", one.name)
        one.goes_on()
        return why, True

    rows.ask("suspend", "refused; it goes on with what it had", look, 20)


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
            size = machine.total_mib * 3 // 4
            share = {**ALLOW, "memory": f"{size + 2048}MiB"}
            with kept.kept(machine, engine, "other", size, share) as other:
                why = refused("no-room", "resume", "first")
                state = one.state()
                other.goes_on()
            return f"{size} MiB taken; {why}", state == "suspended"

        rows.ask("… another takes 75 % of the GPU, and resume", "refused with its figures; suspended still", taken, 15)

        def back():
            done = do("resume", "first", "--wait", "20s")
            one.goes_on()
            return f"{done['seconds']:.1f} s, on GPUs {one.gpus()}", one.gpus() == [0]

        rows.ask("… resume", "it goes on with what it had, on GPU 0", back)

        def paused():
            one.again()
            engine.call("pause", "first")
            why = refused("paused", "suspend", "first")
            engine.call("unpause", "first")
            one.goes_on()
            return why, True

        rows.ask("docker pause, suspend", "refused; it goes on", paused)

        def meanwhile():
            one.again()
            do("suspend", "first")
            done = [engine.call("pause", "first"), engine.call("unpause", "first"), engine.execute("first", ["true"], 20)]
            do("resume", "first", "--wait", "20s")
            one.goes_on()
            return "; ".join("ok" if each.ok else each.why() for each in done), all(each.ok for each in done)

        rows.ask("while suspended: docker pause, unpause, exec", "they work, and it comes back", meanwhile, 15)

        def computing():
            one.again()
            do("suspend", "first")
            before = one.lease()["suspended_bytes"]
            with ThreadPoolExecutor(1) as pool:
                new = pool.submit(engine.execute, "first", machine.hold(15), 60)
                grown = process.eventually(lambda: one.lease()["suspended_bytes"] > before, 14, 0.3)
                do("resume", "first", "--wait", "20s")
                one.goes_on()
                done = new.result()
            return f"suspended, too: {grown}; exec ended with status {done.status}; {done.out.strip()[-80:]}", grown and done.ok

        rows.ask("while suspended: a process that computes, by exec", "suspended by the guard, and both come back", computing, 40)

        def restarted():
            one.again()
            before, lease = one.last()["n"], one.lease()["id"]
            do("suspend", "first")
            done = engine.call("restart", "--time=1", "first")
            again = process.eventually(lambda: (one.last() or {"n": before})["n"] < before, 60, 0.3)
            new = one.lease() or {"id": "none", "state": "none"}
            one.goes_on()
            return f"{'' if done.ok else done.why()} lease {new['state']}, {'it began anew' if again else 'it did not begin'}", done.ok and again and new["id"] != lease

        rows.ask("while suspended: docker restart", "a new lease; it begins anew", restarted, 20)

        def stopped():
            one.again()
            do("suspend", "first")
            done = engine.call("stop", "--time=1", "first")
            gone = process.eventually(lambda: one.lease() is None, 15, 0.3)
            return f"{'ok' if done.ok else done.why()}; {'no lease' if gone else one.state()}", done.ok and gone

        rows.ask("while suspended: docker stop", "no lease left", stopped, 15)

    def removed():
        with kept.kept(machine, engine, "second", mib) as one:
            pid = one.pid()
            do("suspend", "second")
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
            return ", ".join(reasons), "done" in reasons and set(reasons) <= REFUSED_TWICE | {"done"} and reasons.count("done") == 1

    rows.ask("suspend twice at once", "one does it, the other is refused", twice, 15)


# `paused`: the driver has it locked already, for the other one.
REFUSED_TWICE = {"busy", "suspended", "paused"}


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


def cut_short(rows, machine):
    mib = usual(machine)
    with kept.kept(machine, machine.docker, "killed", mib) as one:
        for verb, name in (("suspend", "suspending"), ("resume", "resuming")):
            for with_child in (False, True):

                def look():
                    seen = []
                    for step in kept.steps(machine, mib, name):
                        one.again()
                        if verb == "resume":
                            do("suspend", "killed")
                        was = kept.killed(one, [verb, "killed"], step, with_child)
                        state = settled(one)
                        seen.append(f"{was}: {state}")
                        if state == "suspended":
                            do("resume", "killed")
                        one.goes_on()
                    in_it = was == name or machine.simulated
                    return "; ".join(seen) + f"; on GPUs {one.gpus()}", in_it and one.gpus() == [0]

                title = f"kill -9 of {verb}{' and of its child' if with_child else ''}, at several steps"
                rows.ask(title, "put right by the next command; it goes on with what it had", look, 20)

    def container():
        with kept.kept(machine, machine.docker, "ends", mib) as one:
            pid, null = one.pid(), subprocess.DEVNULL
            command = subprocess.Popen(["sublet", "suspend", "ends"], stdin=null, stdout=null, stderr=null)
            was = kept.at_step(one, *kept.middle(machine, mib, "suspending"), command)
            process.must(["kill", "-KILL", str(pid)])
            status = command.wait(60)
            gone = process.eventually(lambda: one.lease() is None, 20, 0.3)
            left = process.eventually(lambda: not kept.on_gpus(machine, pid), 10, 0.3)
            seen = f"{was}; the command: status {status}; {'no lease' if gone else one.state()}; {'on no GPU' if left else 'on a GPU'}"
            return seen, gone and left

    rows.ask("kill -9 of the container's process in the middle of it", "no lease, nothing on the GPU", container, 20)


def engine_killed(rows, machine):
    """Docker is killed while the driver copies. Started again, it ends what ran, or goes on with it."""
    mib = usual(machine)

    def look(verb, step):
        with kept.kept(machine, machine.docker, "docked", mib) as one:
            if verb == "resume":
                do("suspend", "docked")
            said, was = kill_dockerd(machine, one, kept.middle(machine, mib, step), verb, "docked")
            seen = f"{was}: {verb}: {said}; Docker says {'it runs' if one.runs() else 'it ended'}"
            if one.runs():
                if settled(one) == "suspended":
                    do("resume", "docked")
                one.goes_on()
                return f"{seen}; it goes on", True
            gone = process.eventually(lambda: one.lease() is None, 20, 0.3)
            return f"{seen}; {'no lease' if gone else one.lease()}", gone

    for verb, step in (("suspend", "suspending"), ("resume", "resuming")):
        rows.ask(f"kill -9 of dockerd in the middle of {verb}", "it ends with its lease, or comes back", lambda: look(verb, step), 40)


def kill_dockerd(machine, one, step, *words):
    """Kills dockerd at this step of a command, and starts it again: the command's reason, and the step in which it was."""
    null = subprocess.DEVNULL
    command = subprocess.Popen(["sublet", *words, "--format", "json"], stdin=null, stdout=subprocess.PIPE, stderr=null, text=True)
    was = kept.at_step(one, *step, command)
    machine.daemon.send_signal(signal.SIGKILL)
    machine.daemon.wait()
    try:
        said = json.loads(command.communicate(timeout=100)[0])
    finally:
        machine.start_dockerd()
    # It looks after its containers before it answers, or soon behind that.
    process.eventually(lambda: not one.runs(), 10, 0.3)
    return "done" if isinstance(said, list) else said["reason"], was


def small_turns(rows, machine):
    take_turns(rows, machine, 1024, machine.total_mib * 63 // 100, 10 if machine.simulated else 3)


def take_turns(rows, machine, mib, booked_mib, count=10):
    """Two containers that hold `mib`, and book more than half of what there is: one goes out, the other comes back, 2 × `count` times."""
    share = {**ALLOW, "memory": f"{booked_mib}MiB"}
    pair, out, back, rss = [], [], [], []

    def look():
        for name in ("turn-one", "turn-two"):
            if pair:
                out.append(do("suspend", pair[0].name)["seconds"])
            pair.append(Kept(machine, machine.docker, name, mib, share).ready())
        resting, working = pair
        longest = 0.0
        while len(back) < 2 * count and rows.table.clock.left() > 20 + 1.5 * longest:
            start = time.monotonic()
            out.append(do("suspend", working.name)["seconds"])
            back.append(do("resume", resting.name, "--wait", "30s")["seconds"])
            resting.goes_on()
            rss.append((resting.rss_mib(), working.rss_mib()))
            resting, working = working, resting
            longest = max(longest, time.monotonic() - start)
        working.goes_on()
        working.remove()
        do("resume", resting.name, "--wait", "30s")
        resting.goes_on()
        gib, median = mib / 1024, statistics.median
        return (
            f"{len(back)} turns in all, of {mib} MiB: out {median(out):.2f} s ({gib / median(out):.2f} GiB/s), back {median(back):.2f} s "
            f"({gib / median(back):.2f} GiB/s), {longest:.1f} s for both at most; RSS {rss[-1][0]} MiB on the GPU, {rss[-1][1]} MiB while out; both right, none lost"
        ), len(back) >= 2

    rows.ask(f"two containers that book {share['memory']} and hold {mib} MiB each, {count} turns each", "the results of both stay right, none is lost", look, 40)
    if back:
        kept.write_numbers(rows, "out", mib, sublet=out)
        kept.write_numbers(rows, "back", mib, sublet=back)
    for one in pair:
        one.remove()


def on_demand(rows, machine):
    """A start that finds no room has another suspended, which comes back by itself."""
    RULES.write_text('[suspend]\nat_least = "1s"\n')
    machine.end_serve()
    machine.start_serve()
    try:
        for mib in (1024, large_mib(machine, 25)):
            makes_room(rows, machine, mib)
        idle_first(rows, machine)
    finally:
        RULES.unlink()
        machine.end_serve()
        machine.start_serve()


RULES = Path("/etc/sublet/conf.d/suspend.toml")


def makes_room(rows, machine, mib):
    share = {**ALLOW, "memory": f"{machine.total_mib * 6 // 10}MiB"}

    def first_call(name):
        """A container, and seconds from its start to the end of its first CUDA calls."""
        begun = time.monotonic()
        one = Kept(machine, machine.docker, name, 256, share)
        process.eventually(lambda: '"info"' in machine.docker.logs(name), 60, 0.02)
        seconds = time.monotonic() - begun
        return one.ready(), seconds

    def look():
        try:
            alone = first_call("alone")[1]
            machine.docker.remove("alone")
            chat = Kept(machine, machine.docker, "chat", mib, share).ready()
            chat.has_processes(1)
            time.sleep(1.5)
            beside = first_call("image")[1]
            chat.waits()
            state, gpus = chat.state(), chat.gpus()
            waits = json.loads(process.must(["sublet", "status", "--format", "json"]))["waiting"]
            waiting = [one["container_id"] for one in waits] == [machine.docker.state("chat", ".Id")]
            machine.docker.remove("image")
            ended = time.monotonic()
            back = process.eventually(lambda: chat.state() == "active", 60, 0.1)
            seconds = time.monotonic() - ended
            chat.goes_on()
        finally:
            machine.docker.remove("alone", "chat", "image")
        kept.write_numbers(rows, "first CUDA call", mib, alone=[alone], on_demand=[beside])
        seen = (f"first CUDA call {alone:.1f} s after docker run with room, {beside:.1f} s where {mib} MiB went out for it; "
                f"that one: {state}, on GPUs {gpus}, {'listed among those who wait' if waiting else waits}; back {seconds:.1f} s after the other's end")
        return seen, state == "suspended" and gpus == [] and waiting and back

    rows.ask(f"docker run where another with {mib} MiB has the room", "it starts, the other is suspended for it, and comes back by itself", look, 45)


def idle_first(rows, machine):
    """Of two that may go, the one that computes stays, though it came first."""
    share = {**ALLOW, "memory": f"{machine.total_mib * 4 // 10}MiB"}

    def look():
        if machine.simulated:
            raise Skip("the driver is simulated")
        names = ("busy", "idle", "third")
        try:
            busy = Kept(machine, machine.docker, "busy", 1024, share).ready()
            idle = Kept(machine, machine.docker, "idle", 1024, share, command=kept.keep(machine, 1024, "idle")).ready()
            busy.has_processes(1)
            idle.has_processes(1)
            time.sleep(2)
            Kept(machine, machine.docker, "third", 256, share).ready()
            states = {one.name: one.state() for one in (busy, idle)}
            busy.goes_on()
            machine.docker.remove("third")
            back = process.eventually(lambda: idle.state() == "active", 30, 0.1)
            idle.goes_on()
        finally:
            machine.docker.remove(*names)
        return f"busy: {states['busy']}, idle: {states['idle']}; {'back' if back else 'not back'}", list(states.values()) == ["active", "suspended"] and back

    rows.ask("docker run where one of two has to go, of which one computes", "the idle one goes, though it came last", look, 40)


def large_mib(machine, percent, count=1):
    """So much of the GPU, if the host has memory for `count` copies of that."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    available = int(line.split()[1]) >> 10
    room = max(available - 16384, available * 4 // 10) // count
    return min(int(machine.total_mib * percent / 100), room)


def speed(table, group, machine):
    """In turns: by the product, and by tests/gpu/checkpoint.c on the same process. Each begins every other time, and each step a
    moment after the one before it, by either way: nobody's container goes out in the moment in which it has come back.

    As many pairs as there is time for, twelve of large ones at most: one time takes up to a third more than another.
    """
    kept.group_of(table, group, machine, [beside_by_hand])


def beside_by_hand(rows, machine):
    small = in_turns(rows, machine, kept.SMALL_MIB, 2 if machine.simulated else 20)
    large = in_turns(rows, machine, large_mib(machine, 20), 2 if machine.simulated else 12)
    for way in large if small and large else ():
        kept.compare(rows, way, large[way], small[way], not machine.simulated)


def in_turns(rows, machine, mib, most):
    """Up to `most` pairs with one container: for each way (MiB, seconds by the product, by hand); `None` where it went wrong."""
    ours, theirs = ([], []), ([], [])
    pause = 0 if machine.simulated else 1

    def steps(times, step):
        for seconds, verb in zip(times, ("suspend", "resume")):
            time.sleep(pause)
            seconds.append(step(verb)["seconds"])

    def by_product():
        steps(ours, lambda verb: do(verb, "timed"))

    def by_hand(pid):
        steps(theirs, lambda verb: kept.by_hand(machine, verb, pid))

    def look():
        longest = 0
        with kept.kept(machine, machine.docker, "timed", mib) as one:
            pid = one.pid()
            while len(theirs[0]) < most and rows.table.clock.left() > longest + 30:
                began = time.monotonic()
                for each in (by_product, lambda: by_hand(pid))[:: -1 if len(theirs[0]) % 2 else 1]:
                    each()
                one.goes_on()
                longest = max(longest, time.monotonic() - began)
        if len(theirs[0]) < 2:
            raise Skip("time")
        return f"{mib} MiB, {len(theirs[0])} times each", True

    done = rows.ask("by the product and by hand in turns", "it goes on with what it had, each time", look, 75)
    return {way: (mib, *times) for way, *times in zip(("out", "back"), ours, theirs)} if done else None


def of_users(rows, machine):
    """A user's own Podman: `sublet serve` does it, and is killed in the middle of it."""
    rows.engine, mib = "podman, rootless", usual(machine)
    if rows.table.clock.left() < 60:
        return rows.skip("all", "time")
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
        for verb, name in (("suspend", "suspending"), ("resume", "resuming")):
            step = kept.middle(machine, mib, name)
            rows.ask(f"kill -9 of the service in the middle of {verb}", "put right by the next one; it goes on", lambda: service_killed(machine, one, verb, step), 25)
    finally:
        engine.remove_all()
        groups.USERS_POLICY.unlink(missing_ok=True)


def service_killed(machine, one, verb, step):
    before, null = groups.by_user(), subprocess.DEVNULL
    one.again()
    if verb == "resume":
        do("suspend", one.name, before=before)
    command = subprocess.Popen([*before, "sublet", verb, one.name], stdin=null, stdout=null, stderr=null)
    was = kept.at_step(one, *step, command)
    machine.end_serve()
    status = command.wait(60)
    machine.start_serve()
    state = settled(one)
    if state == "suspended":
        do("resume", one.name, before=before)
    one.goes_on()
    return f"{was}; the command: status {status}; then {state}; on GPUs {one.gpus()}", one.gpus() == [0]
