"""PyTorch that computes for SECS and holds MIB: `torch_load.py SECS MIB`. One JSON line when it has its memory, and one each
second with the multiplications done in it.
"""

import json
import sys
import time

import torch


def say(**line):
    print(json.dumps(line), flush=True)


def main(seconds, mib):
    held = torch.zeros(mib << 20, dtype=torch.uint8, device="cuda")
    ones = torch.ones((2048, 2048), device="cuda")
    torch.cuda.synchronize()
    say(event="info", error=None, held_mib=held.numel() >> 20)
    until = time.monotonic() + seconds
    while (begun := time.monotonic()) < until:
        done = 0
        while time.monotonic() - begun < 1:
            for _ in range(10):
                ones @ ones
            torch.cuda.synchronize()
            done += 10
        say(event="rate", per_second=done / (time.monotonic() - begun))


main(float(sys.argv[1]), int(sys.argv[2]))
