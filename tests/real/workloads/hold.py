"""Holds a context for SECS and computes now and then, until an error: `hold.py SECS [fill]`. With `fill` it takes all the
memory that it gets, frees it and begins again. It prints a JSON line when it has a context, one for each fill, one at the end.
"""

import json
import sys
import time

from common import Driver


def say(**line):
    print(json.dumps(line), flush=True)


def filled(driver):
    held = []
    try:
        while True:
            held.append(driver.take(64))
            driver.fill(held[-1], 7, 1 << 24)
    except RuntimeError as error:
        if "OUT_OF_MEMORY" not in str(error):
            raise
    say(event="full", mib=64 * len(held))
    time.sleep(0.3)
    right = all(driver.first(pointer, 1) == [7] for pointer in held)
    for pointer in held:
        driver.free(pointer)
    if not right:
        raise RuntimeError("another's words stand in its memory")


def main(seconds, fill):
    driver = Driver()
    say(event="info", error=None, **driver.look(0))
    until = time.monotonic() + seconds
    pointer = driver.take(1)
    try:
        while time.monotonic() < until:
            if fill:
                filled(driver)
            driver.fill(pointer, 7, 1 << 18)
            time.sleep(0.05)
    except RuntimeError as error:
        say(event="end", result=str(error))
        sys.exit(10)
    say(event="end", result="CUDA_SUCCESS")


main(float(sys.argv[1]), "fill" in sys.argv[2:])
