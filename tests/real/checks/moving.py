"""`sublet move`, `resume --gpu` and `drain --move` between two GPUs of one model (docs/suspend.md): a container goes on there with
what it had, and has the node of that GPU alone; what is refused goes on where it was; what is killed at any step is put right.
"""

import subprocess
from pathlib import Path

from . import engines, groups, kept, process
from .kept import ALLOW, WITHOUT_RIGHTS, Kept, do, refused, settled
from .machine import WORK
from .suspending import POLICY, kill_dockerd, large_mib, usual
from .table import Rows, Wrong


def move(table, group, machine):
    if machine.count() < 2:
        return Rows(table, group).skip("move", groups.TWO)
    begun = kept.begin_frameworks(table, group, machine, ("torch", "graph", "jax", "cupy", "transformers"))

    def frameworks(_, machine):
        look = lambda one: moved(machine, one, (1, 0))
        kept.look_at_frameworks(begun, "move to GPU 1 and back", "on that GPU; the same results, bit by bit", look)

    kept.group_of(table, group, machine, [there_and_back, goes_back, frameworks, drained, cut_short, speed, joined, of_users, engine_killed])


def node(machine, index):
    return f"/dev/nvidia{machine.devices()[index]['minor']}"


def check_is_on(machine, one, index):
    """It computes with what it had, on this GPU alone, by the driver, by the ledger and by its nodes."""
    one.goes_on()
    gpus, lease = one.gpus(), one.lease()
    device = machine.devices()[index]["uuid"]
    if gpus != [index] or lease is None or (lease["device"], lease["state"]) != (device, "active"):
        raise Wrong(f"{one.name} is on GPUs {gpus}, and the ledger has {lease}; expected: GPU {index}")
    if (nodes := one.nodes()) != [node(machine, index)]:
        raise Wrong(f"{one.name} has the nodes {' '.join(nodes)}; expected: {node(machine, index)}")


def moved(machine, one, to, before=()):
    """Moves it to these GPUs one after the other."""
    seconds = []
    for index in to:
        seconds.append(do("move", one.name, "--gpu", str(index), before=before)["seconds"])
        check_is_on(machine, one, index)
    return f"{len(seconds)} moves, each took {', '.join(f'{one:.1f}' for one in seconds)} s", True


def there_and_back(rows, machine):
    """Under load, three times in each direction."""
    for engine, title, options in (
        (machine.docker, "root", []),
        (machine.docker, "uid 1000 without capabilities", WITHOUT_RIGHTS),
        (machine.podman, "Podman", []),
    ):
        rows.engine = engine.name
        to = (1, 0) if engine is machine.podman else (1, 0) * 3

        def look():
            with kept.kept(machine, engine, "moves", usual(machine), options=options) as one:
                return moved(machine, one, to)

        rows.ask(f"{title}: GPU 0 to 1 and back, {len(to)} moves under load", "on that GPU alone, with its node alone, with what it had", look, 35)


def joined(rows, machine):
    """One that comes back on another GPU: what begins in it later, and its later steps."""
    with kept.kept(machine, machine.docker, "moved", usual(machine)) as one:
        def arrives():
            do("suspend", "moved")
            done = do("resume", "moved", "--gpu", "1")
            check_is_on(machine, one, 1)
            return f"{done['seconds']:.1f} s, on GPU 1", True

        rows.ask("suspend, resume --gpu 1, of one that was never moved", "on the second GPU, with what it had", arrives, 15)

        def executed():
            done = machine.docker.execute("moved", kept.keep(machine, 16, seconds=0.3), 60)
            lines = [engines.last_json(line) for line in done.out.splitlines()]
            seen = next((line["uuid"] for line in lines if line and line.get("uuid")), done.why())
            return seen, seen == machine.devices()[1]["uuid"]

        rows.ask("after a move: a process by docker exec", "sees the second GPU", executed, 15)

        def suspended():
            one.again()
            do("suspend", "moved")
            nodes = one.nodes()
            do("resume", "moved")
            check_is_on(machine, one, 1)
            return f"nodes while suspended: {' '.join(nodes)}; on GPU 1", nodes == [node(machine, 1)]

        rows.ask("after a move: suspend, resume", "on the second GPU; the first one's node is there for the steps alone", suspended, 15)

        def elsewhere():
            one.again()
            do("suspend", "moved")
            done = do("resume", "moved", "--gpu", "0")
            check_is_on(machine, one, 0)
            return f"{done['seconds']:.1f} s, on GPU 0", True

        rows.ask("suspend, resume --gpu 0", "on the first GPU, with what it had", elsewhere, 15)


def goes_back(rows, machine):
    engine = machine.docker
    # Root with CAP_MKNOD would have the driver make the node.
    with kept.kept(machine, engine, "stays", usual(machine), {**ALLOW, "memory": "16GiB"}, ["--cap-drop=MKNOD"]) as one:

        def no_room():
            share = {"gpu": "1", "mode": "time-slice", "memory": f"{machine.total_mib * 9 // 10}MiB"}
            if not engine.start("large", share, ["sleep", "600"]).ok:
                raise Wrong("the other GPU could not be booked")
            try:
                why = refused("no-room", "move", "stays", "--gpu", "1")
                check_is_on(machine, one, 0)
                return why, True
            finally:
                engine.remove("large")

        rows.ask("no room on the other GPU", "refused with its figures; it goes on where it was", no_room, 10)

        def occupied():
            at = node(machine, 1)
            made = engine.execute("stays", ["sh", "-c", f"rm -f {at}; echo >{at}"], 20)
            why = refused("suspend-undone", "move", "stays", "--gpu", "1")
            one.goes_on()
            gpus = one.gpus()
            engine.execute("stays", ["rm", "-f", at], 20)
            do("move", "stays", "--gpu", "1")
            check_is_on(machine, one, 1)
            return f"{why}; on GPUs {gpus}; then moved", made.ok and gpus == [0]

        rows.ask("something else at the other GPU's node", "it goes on where it was; once that is gone, it moves", occupied, 20)

    def never():
        with kept.kept(machine, engine, "never", 512, {"gpu": "0", "mode": "time-slice"}) as one:
            why = refused("suspend-not-allowed", "move", "never", "--gpu", "1")
            check_is_on(machine, one, 0)
            return why, True

    rows.ask("without sublet.suspend", "refused; it goes on", never, 10)

    def managed():
        with kept.kept(machine, engine, "managed", 512, command=kept.keep(machine, 512, "managed")) as one:
            why = refused("suspend-undone", "move", "managed", "--gpu", "1")
            check_is_on(machine, one, 0)
            return why, "CUDA_ERROR_NOT_SUPPORTED" in why

    rows.ask("managed memory", "the driver refuses; it goes on where it was, with its node alone", managed, 15)


    def pair():
        share = {"gpu": "any:2", "mode": "time-slice", "wait": "30s"}
        if not (started := engine.start("pair", share, ["sleep", "600"])).ok:
            raise Wrong(started.why())
        try:
            return refused("cannot-suspend", "suspend", "pair", "--force"), True
        finally:
            engine.remove("pair")

    rows.ask("two GPUs in one share: suspend --force", "refused, because the driver would lose it", pair, 10)


def drained(rows, machine):
    engine = machine.docker

    def look():
        words = [("one", ALLOW), ("two", ALLOW), ("never", {"gpu": "0", "mode": "time-slice"})]
        all_three = [Kept(machine, engine, f"drain-{name}", 1024, share) for name, share in words]
        try:
            for one in all_three:
                one.ready()
            done = process.run(["sublet", "drain", "0", "--move"], 120)
            for one, index in zip(all_three, (1, 1, 0)):
                # On a host with more GPUs, to any of them.
                if index == 0 or machine.count() == 2:
                    check_is_on(machine, one, index)
                one.goes_on()
            said = done.out + done.err
            right = done.status == 1 and "drain-never stays" in said and said.count("Moved drain-") == 2
            all_three.pop().remove()
            again = process.run(["sublet", "drain", "0", "--move"], 60)
            return f"{' '.join(said.split())}; then status {again.status}", right and again.ok
        finally:
            process.must(["sublet", "undrain", "0"])
            for one in all_three:
                one.remove()

    rows.ask("drain 0 --move, with two that may be moved and one that may not", "two are moved, the third is named; status 1, then 0", look, 30)


def cut_short(rows, machine):
    mib = usual(machine)
    with kept.kept(machine, machine.docker, "killed", mib) as one:
        for with_child in (False, True):

            def look():
                seen, steps = [], kept.steps(machine, mib, "suspending", "resuming")
                met = 0
                for name, seconds in steps:
                    one.again()
                    here = one.gpus()[0]
                    was = kept.killed(one, ["move", "killed", "--gpu", str(1 - here)], (name, seconds), with_child)
                    met += was == name
                    state = settled(one)
                    if state == "suspended":
                        do("resume", "killed")
                    now = one.gpus()
                    seen.append(f"{was}: {state}, {here} → {' and '.join(map(str, now))}")
                    if len(now) != 1:
                        raise Wrong("; ".join(seen))
                    check_is_on(machine, one, now[0])
                return "; ".join(seen), met == len(steps) - 1 or machine.simulated

            title = f"kill -9 of move{' and of its child' if with_child else ''}, at several steps"
            rows.ask(title, "put right by the next command: on one GPU, with its node alone, with what it had", look, 30)

    def container():
        with kept.kept(machine, machine.docker, "ends", mib) as one:
            pid, null = one.pid(), subprocess.DEVNULL
            command = subprocess.Popen(["sublet", "move", "ends", "--gpu", "1"], stdin=null, stdout=null, stderr=null)
            was = kept.at_step(one, *kept.middle(machine, mib, "resuming"), command)
            process.must(["kill", "-KILL", str(pid)])
            status = command.wait(60)
            gone = process.eventually(lambda: one.lease() is None, 20, 0.3)
            left = process.eventually(lambda: not kept.on_gpus(machine, pid), 10, 0.3)
            seen = f"{was}; the command: status {status}; {'no lease' if gone else one.state()}; {'on no GPU' if left else 'on a GPU'}"
            return seen, gone and left

    rows.ask("kill -9 of the container's process in the middle of it", "no lease, nothing on either GPU", container, 20)


def engine_killed(rows, machine):
    mib = usual(machine)

    def look():
        with kept.kept(machine, machine.docker, "docked", mib) as one:
            said, was = kill_dockerd(machine, one, kept.middle(machine, mib, "suspending"), "move", "docked", "--gpu", "1")
            seen = f"{was}: move: {said}; Docker says {'it runs' if one.runs() else 'it ended'}"
            if one.runs():
                check_is_on(machine, one, 1)
                return f"{seen}; on GPU 1", True
            gone = process.eventually(lambda: one.lease() is None, 20, 0.3)
            return f"{seen}; {'no lease' if gone else one.lease()}", gone

    rows.ask("kill -9 of dockerd in the middle of move", "it ends with its lease, or is on the other GPU", look, 40)


def speed(rows, machine):
    """In turns: by the product, and by tests/gpu/checkpoint.c on a process of the host with as much memory."""
    if machine.simulated:
        return rows.skip("by the product and by hand in turns", "the driver is simulated")
    # Large, beside what the checks take.
    times = [in_turns(rows, machine, mib, turns) for mib, turns in ((kept.SMALL_MIB, 7), (large_mib(machine, 20, 2), 3))]
    if all(times):
        kept.compare(rows, "move, out and in", times[1], times[0], True)


def in_turns(rows, machine, mib, turns):
    """(MiB, seconds by the product, by hand); `None` where it went wrong."""
    first, second, *more = [device["uuid"] for device in machine.devices()]
    pairs = [first, second, second, first, *(uuid for one in more for uuid in (one, one))]
    ours, theirs = [], []

    def look():
        log = "/tmp/hand.log"
        hand = process.background([*HAND, str(mib), "600"], log)
        try:
            # The container's program is checked by its log; this one by where it is.
            if not process.eventually(lambda: "round" in Path(log).read_text(), 60, 0.3):
                raise Wrong(f"the process by hand does not compute: {Path(log).read_text()[-300:]}")
            with kept.kept(machine, machine.docker, "timed", mib) as one:
                for turn in range(turns):
                    to = (turn + 1) % 2
                    ours.append(do("move", "timed", "--gpu", str(to))["seconds"])
                    theirs.append(kept.by_hand(machine, "move", hand.pid, *pairs)["seconds"])
                    check_is_on(machine, one, to)
                    if kept.on_gpus(machine, hand.pid) != [to]:
                        raise Wrong(f"by hand it is on GPUs {kept.on_gpus(machine, hand.pid)}")
        finally:
            hand.kill()
            hand.wait()
        return f"{mib} MiB, {turns} times each", True

    done = rows.ask("by the product and by hand in turns", "on the other GPU with what it had, each time", look, 90)
    return (mib, ours, theirs) if done else None


HAND = ["env", "CUDA_VISIBLE_DEVICES=0", "python3", str(WORK / "keep.py")]


def of_users(rows, machine):
    rows.engine, mib = "podman, rootless", usual(machine)
    if rows.table.clock.left() < 60:
        return rows.skip("all", "time")
    engine = groups.users_podman(machine, POLICY)
    before = groups.by_user()
    try:
        one = Kept(machine, engine, "mine", mib).ready()
        rows.ask("to GPU 1 and back, by the user", "on that GPU alone, with its node alone, with what it had", lambda: moved(machine, one, (1, 0), before), 25)

        def killed():
            one.again()
            here, null = one.gpus()[0], subprocess.DEVNULL
            command = subprocess.Popen([*before, "sublet", "move", "mine", "--gpu", str(1 - here)], stdin=null, stdout=null, stderr=null)
            was = kept.at_step(one, *kept.middle(machine, mib, "suspending"), command)
            machine.end_serve()
            status = command.wait(60)
            machine.start_serve()
            state, now = settled(one), one.gpus()
            if state == "suspended":
                do("resume", "mine", before=before)
                now = one.gpus()
            if len(now) != 1:
                raise Wrong(f"{state}, on GPUs {now}")
            check_is_on(machine, one, now[0])
            return f"{was}; the command: status {status}; then {state}, on GPU {now[0]}", True

        rows.ask("kill -9 of the service in the middle of move", "put right by the next one: on one GPU, with its node alone", killed, 25)
    finally:
        engine.remove_all()
        groups.USERS_POLICY.unlink(missing_ok=True)
