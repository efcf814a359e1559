"""Runs programs, each with a time limit and in a process group that is killed with it."""

import os
import signal
import subprocess
import sys
import time


class Done:
    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err
        self.ok = status == 0

    def why(self):
        """The end of a failed program's output."""
        text = (self.err.strip() or self.out.strip() or "no word").splitlines()
        return f"status {self.status}: " + " ".join(text[-6:])[-800:]


def run(command, timeout=60, **options):
    """Runs a command. If it takes too long it is killed, and its status is 124."""
    started = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True, **options,
    )
    try:
        out, err = started.communicate(timeout=max(timeout, 1))
        if started.returncode:
            # The log gets the whole message, the table only a line.
            print(f"-- status {started.returncode}: {command[-6:]}\n{err[-8000:]}", file=sys.stderr, flush=True)
        return Done(started.returncode, out, err)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        # A grandchild in another process group may keep the pipes open.
        try:
            out, err = started.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            out, err = "", ""
        return Done(124, out, err + f"\nended after {timeout:.0f} s")


def must(command, timeout=120, **options):
    done = run(command, timeout, **options)
    if not done.ok:
        raise RuntimeError(f"{' '.join(command[:6])}: {done.why()}")
    return done.out


def background(command, log, **options):
    """Starts a daemon, which dies with the namespace."""
    with open(log, "ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, **options)


def eventually(look, seconds=10, pause=0.1):
    """Waits until `look` returns true; whether it did in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if look():
            return True
        time.sleep(pause)
    return bool(look())
