"""Ends its first thread and computes in another one, with MIB of GPU memory, for SECS: `leader.py MIB SECS WHEN [cheat]`.

WHEN: `early` (at once), `context` (once the CUDA context is made), `child` (a child process does it early, while this one
waits), `children` (two such children). With `cheat` each process tampers with its memory limit.
"""

import ctypes
import json
import os
import platform
import subprocess
import sys
import threading
import time

if "cheat" in sys.argv:
    os.environ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = "garbage"

from common import Driver

EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]


def say(**line):
    print(json.dumps(line), flush=True)


def compute(driver, mib, seconds):
    driver.context(0)
    held = [driver.take(256) for _ in range(mib // 256)]
    say(event="took", mib=256 * len(held))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        driver.fill(held[0], 7, 1 << 18)
        time.sleep(0.05)
    say(event="never ended")
    os._exit(0)


def main(mib, seconds, when):
    if when in ("child", "children"):
        command = [sys.executable, *sys.argv[:3], "early", *sys.argv[4:]]
        for child in [subprocess.Popen(command) for _ in range(2 if when == "children" else 1)]:
            child.wait()
        return
    made = threading.Event()
    driver = []

    def work():
        driver.append(Driver())
        driver[0].context(0)
        made.set()
        compute(driver[0], mib, seconds)

    threading.Thread(target=work, daemon=True).start()
    if when == "context":
        made.wait()
    # Of this thread alone (exit(2)). ctypes has let go of the interpreter's lock.
    ctypes.CDLL(None).syscall(EXIT, 0)


main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
