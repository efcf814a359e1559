"""`sublet move`, `resume --gpu` and `drain --move` between two GPUs of one model (docs/suspend.md): a container goes on there with
what it had, and has the node of that GPU alone; what is refused goes on where it was; what is killed at any step is put right.
"""

import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from . import engines, groups, kept, process
from .kept import ALLOW, WITHOUT_RIGHTS, Kept, ask, do, refused
from .machine import WORK
from .suspending import POLICY, settled, usual
from .table import Rows, Wrong


def move(table, group, machine):
    if machine.count() < 2:
        return Rows(table, group).skip("move", groups.TWO)
    begun = kept.begin_frameworks(table, group, machine, ("torch", "graph", "jax", "cupy", "transformers"))

    def frameworks(_, machine):
        look = lambda one: moved(machine, one, (1, 0))
        kept.look_at_frameworks(begun, "move to GPU 1 and back", "on that GPU; the same results, bit by bit", look)

    kept.group_of(table, group, machine, [there_and_back, joined, goes_back, frameworks, drained, cut_short, speed, engine_killed, of_users])


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
    """What begins in it later, and its later steps."""
    with kept.kept(machine, machine.docker, "moved", usual(machine)) as one:
        do("move", "moved", "--gpu", "1")

        def executed():
            done = machine.docker.execute("moved", kept.keep(machine, 16, seconds=0.3), 60)
            lines = [engines.last_json(line) for line in done.out.splitlines()]
            seen = next((line["uuid"] for line in lines if line and line.get("uuid")), done.why())
            return seen, seen == machine.devices()[1]["uuid"]

        rows.ask("after a move: a process by docker exec", "sees the second GPU", executed, 15)

        def suspended():
            do("suspend", "moved")
            nodes = one.nodes()
            do("resume", "moved")
            check_is_on(machine, one, 1)
            return f"nodes while suspended: {' '.join(nodes)}; on GPU 1", nodes == [node(machine, 1)]

        rows.ask("after a move: suspend, resume", "on the second GPU; the first one's node is there for the steps alone", suspended, 15)

        def elsewhere():
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
                seen = []
                for seconds in kept.steps(machine, mib, 0.45, 0.2):
                    here = one.gpus()[0]
                    ended = kept.killed(["move", "killed", "--gpu", str(1 - here)], seconds, with_child)
                    state, now = settled(one), one.gpus()
                    if state == "suspended":
                        do("resume", "killed")
                    now = one.gpus()
                    seen.append(f"{seconds:.2f} s{' (had ended)' if ended else ''}: {state}, {here} → {' and '.join(map(str, now))}")
                    if len(now) != 1:
                        raise Wrong("; ".join(seen))
                    check_is_on(machine, one, now[0])
                return "; ".join(seen), True

            title = f"kill -9 of move{' and of its child' if with_child else ''}, at several steps"
            rows.ask(title, "put right by the next command: on one GPU, with its node alone, with what it had", look, 30)

    def container():
        one = Kept(machine, machine.docker, "ends", mib).ready()
        pid, null = one.pid(), subprocess.DEVNULL
        command = subprocess.Popen(["sublet", "move", "ends", "--gpu", "1"], stdin=null, stdout=null, stderr=null)
        time.sleep(kept.steps(machine, mib, 0.45, 0.2)[2])
        process.must(["kill", "-KILL", str(pid)])
        status = command.wait(60)
        gone = process.eventually(lambda: one.lease() is None, 20, 0.3)
        left = process.eventually(lambda: not kept.on_gpus(machine, pid), 10, 0.3)
        one.remove()
        return f"the command: status {status}; {'no lease' if gone else one.state()}; {'on no GPU' if left else 'on a GPU'}", gone and left

    rows.ask("kill -9 of the container's process in the middle of it", "no lease, nothing on either GPU", container, 20)


def engine_killed(rows, machine):
    mib = usual(machine)
    one = Kept(machine, machine.docker, "docked", mib).ready()

    def look():
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(ask, "move", "docked", "--gpu", "1")
            time.sleep(kept.steps(machine, mib, 0.45, 0.2)[1])
            machine.daemon.send_signal(signal.SIGKILL)
            machine.daemon.wait()
            said = done.result()
        machine.start_dockerd()
        process.eventually(lambda: one.engine.state("docked", ".State.Running") == "false", 10, 0.3)
        runs = one.engine.state("docked", ".State.Running") == "true"
        seen = f"move: {said.get('reason', 'done')}; Docker says {'it runs' if runs else 'it ended'}"
        if runs:
            check_is_on(machine, one, 1)
            return f"{seen}; on GPU 1", True
        gone = process.eventually(lambda: not machine.leases(), 20, 0.3)
        return f"{seen}; {'no lease' if gone else machine.leases()}", gone

    rows.ask("kill -9 of dockerd in the middle of move", "it ends with its lease, or is on the other GPU", look, 30)
    one.remove()


def speed(rows, machine):
    """In turns: by the product, and by tests/gpu/checkpoint.c on a process of the host with as much memory."""
    mib = usual(machine) * 2
    if machine.simulated:
        return rows.skip("by the product and by hand in turns", "the driver is simulated")
    first, second, *more = [device["uuid"] for device in machine.devices()]
    pairs = [first, second, second, first, *(uuid for one in more for uuid in (one, one))]
    ours, theirs = [], []

    def look():
        hand = process.background([*HAND, str(mib), "600"], "/tmp/hand.log")
        try:
            # The container's program is checked by its log; this one by where it is.
            if not process.eventually(lambda: "round" in open("/tmp/hand.log").read(), 60, 0.3):
                raise Wrong("the process by hand does not compute")
            with kept.kept(machine, machine.docker, "timed", mib) as one:
                for to in (1, 0, 1):
                    ours.append(do("move", "timed", "--gpu", str(to))["seconds"])
                    said = kept.by_hand(machine, "move", hand.pid, *pairs)
                    theirs.append(said["out_s"] + said["back_s"])
                    check_is_on(machine, one, to)
                    if kept.on_gpus(machine, hand.pid) != [to]:
                        raise Wrong(f"by hand it is on GPUs {kept.on_gpus(machine, hand.pid)}")
        finally:
            hand.kill()
            hand.wait()
        return f"{mib} MiB, three times each", True

    if rows.ask("by the product and by hand in turns", "on the other GPU with what it had, each time", look, 50):
        kept.compare(rows, "… out and in", mib, ours, theirs, True)


HAND = ["env", "CUDA_VISIBLE_DEVICES=0", "python3", str(WORK / "keep.py")]


def of_users(rows, machine):
    rows.engine, mib = "podman, rootless", usual(machine)
    engine = groups.users_podman(machine, POLICY)
    before = groups.by_user()
    try:
        one = Kept(machine, engine, "mine", mib).ready()
        rows.ask("to GPU 1 and back, by the user", "on that GPU alone, with its node alone, with what it had", lambda: moved(machine, one, (1, 0), before), 25)

        def killed():
            null = subprocess.DEVNULL
            command = subprocess.Popen([*before, "sublet", "move", "mine", "--gpu", "1"], stdin=null, stdout=null, stderr=null)
            time.sleep(kept.steps(machine, mib, 0.45, 0.2)[1])
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
            return f"the command: status {status}; then {state}, on GPU {now[0]}", True

        rows.ask("kill -9 of the service in the middle of move", "put right by the next one: on one GPU, with its node alone", killed, 25)
    finally:
        engine.remove_all()
        groups.USERS_POLICY.unlink(missing_ok=True)
