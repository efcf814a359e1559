"""The checks of every framework: one container's share, by `run`, `exec` and a health check."""

from .machine import report
from .table import Skip, Wrong


def wanted(machine, percent, mib, count=1):
    low, high = machine.expected_sms(percent)
    sms = f"{machine.sms}" if percent == 100 else f"{max(low, 2):.0f}–{high:.0f}"
    memory = f", at most {mib} MiB free" if mib else ""
    return f"{sms} SMs{memory}" + (f", {count} times" if count > 1 else "")


def shown(devices):
    return "; ".join(f"{device['sm']} SMs, {device['free_mib']} MiB free" for device in devices)


def sees(machine, found, percent, mib, count):
    """The devices seen, and whether they match the share."""
    devices = found["devices"]
    wrong = [machine.sees_share(device, percent, mib) for device in devices]
    return shown(devices) or "no GPU", len(devices) == count and not any(wrong)


def computed(found, count):
    devices = found["devices"]
    names = " and ".join(device["name"] for device in devices) or "no GPU"
    right = len(devices) == count and all(device["correct"] for device in devices)
    version = f" ({found['framework']} {found['version']})" if found["version"] else ""
    return f"{'right' if right else 'wrong'} on {names}{version}", right


def refused(found, count):
    devices = found["devices"]
    seen = {device.get("refused") or "granted" for device in devices}
    right = len(devices) == count and all(device.get("refused") and device.get("after") for device in devices)
    behind = "" if all(device.get("after") for device in devices) else "; does not compute behind that"
    return "; ".join(sorted(seen)) + behind, right


def once(look):
    """One container's report for three rows. The container runs for the first row."""
    kept = []

    def get():
        if not kept:
            try:
                kept.append(look())
            except (Wrong, Skip) as error:
                kept.append(error)
        if isinstance(kept[0], Exception):
            raise kept[0]
        if "skipped" in kept[0]:
            raise Skip(kept[0]["skipped"])
        return kept[0]

    return get


def by_run(rows, machine, engine, share, command, percent, mib, count=1, what="run"):
    """`run` with the share: it is seen, it computes, and a larger allocation is refused. `command` takes the size of that
    allocation in MiB."""
    over = mib * 12 // 10
    found = once(lambda: report(engine.run(share, command(over), timeout=min(150, rows.table.clock.left()))))
    rows.ask(f"{what}: its share", wanted(machine, percent, mib, count), lambda: sees(machine, found(), percent, mib, count), 20)
    rows.ask(f"{what}: computes", "a right result on the GPU", lambda: computed(found(), count))
    rows.ask(f"{what}: {over} MiB at once", "its own out-of-memory error, and it goes on", lambda: refused(found(), count))


def by_exec_and_health(rows, machine, engine, share, command, percent, mib):
    """A sleeping container, with a health check and then a process by exec."""
    name = f"h{rows.group}x{rows.job}"
    expected = wanted(machine, percent, mib) + ", a right result"
    words = command(None)
    left = rows.table.clock.left

    def both(found):
        seen, right = sees(machine, found, percent, mib, 1)
        what, computes = computed(found, 1)
        return f"{seen}; {what}", right and computes

    def health():
        status, done = engine.checked(name, min(100, left()))
        if status != "healthy":
            raise Wrong(f"{status}: {done.why()}")
        return both(skipping(report(done)))

    def executed():
        return both(skipping(report(engine.execute(name, words, min(100, left())))))

    if left() < 20:
        rows.skip("health check", "time")
        rows.skip("exec", "time")
        return
    try:
        started = engine.start(name, share, ["sleep", "600"], engine.health(quoted(words)))
        if started.ok:
            rows.ask("health check", expected, health)
            rows.ask("exec", expected, executed)
        else:
            rows.hold("health check and exec", "the container starts", started.why(), False)
    finally:
        engine.remove(name)


def skipping(found):
    if "skipped" in found:
        raise Skip(found["skipped"])
    return found


def quoted(words):
    return " ".join(f"'{word}'" for word in words)
