"""Shared by the workloads: their arguments, the driver's view, and the one JSON line that they print.

    NAME.py [--over MIB] [--processes N]

The line: {"framework", "version", "devices": [{"name", "sm", "free_mib", "correct", "refused", "after"}]}, or
{"skipped": why}, or {"error": what}. `refused` is the framework's error for one allocation of MIB on that device,
null where it was granted; `after` is whether the framework still computes behind that.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import traceback


class Skip(Exception):
    """This framework cannot run here."""


class Driver:
    """libcuda by ctypes. Also gives the driver's view for frameworks that have no view of their own."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            word = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(word))
            raise RuntimeError((word.value or b"CUDA_ERROR_UNKNOWN_CODE").decode())

    def count(self):
        number = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def context(self, ordinal):
        """Makes the device's primary context current, which every framework uses."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        return device

    def look(self, ordinal):
        """Name, multiprocessors and free MiB."""
        device = self.context(ordinal)
        name, sm = ctypes.create_string_buffer(100), ctypes.c_int()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuDeviceGetName", name, 100, device)
        self.call("cuDeviceGetAttribute", ctypes.byref(sm), 16, device)
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return {"name": name.value.decode(), "sm": sm.value, "free_mib": free.value >> 20, "total_mib": total.value >> 20}

    def take(self, mib):
        """Allocates memory on the current device and returns its address."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(mib << 20))
        return pointer

    def fill(self, pointer, value, words):
        """Lets the device write 32-bit words, and waits until it has."""
        self.call("cuMemsetD32_v2", pointer, ctypes.c_uint(value), ctypes.c_size_t(words))
        self.call("cuCtxSynchronize")

    def first(self, pointer, words):
        """Reads words back."""
        array = (ctypes.c_uint * words)()
        self.call("cuMemcpyDtoH_v2", array, pointer, ctypes.c_size_t(4 * words))
        return list(array)

    def free(self, pointer):
        self.call("cuMemFree_v2", pointer)


def refusal(take, is_oom):
    """The error that `take` raised, in one line, or None. Errors other than out of memory are raised again."""
    try:
        take()
    except Exception as error:  # each framework has its own class: is_oom knows it
        if not is_oom(error):
            raise
        name = type(error).__qualname__
        if type(error).__module__ != "builtins":
            name = f"{type(error).__module__}.{name}"
        return f"{name}: {str(error).strip().splitlines()[0][:120]}"
    return None


def several(processes, arguments):
    """Runs this program several times at once and joins the reports."""
    command = [sys.executable, *arguments]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    reports = [json.loads(one.communicate()[0].strip().splitlines()[-1]) for one in started]
    wrong = [report for report in reports if "devices" not in report]
    if wrong:
        return wrong[0]
    return dict(reports[0], devices=[device for report in reports for device in report["devices"]])


def main(framework, ask):
    """Prints the report. `ask(over)` returns version and devices; `over` is None or a size in MiB."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--over", type=int)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    try:
        if given.processes > 1:
            again = [sys.argv[0]] + (["--over", str(given.over)] if given.over else [])
            report = several(given.processes, again)
        else:
            version, devices = ask(given.over)
            report = {"framework": framework, "version": version, "devices": devices}
    except Skip as why:
        report = {"framework": framework, "skipped": str(why)}
    except ModuleNotFoundError as error:
        report = {"framework": framework, "skipped": f"not installed: {error.name}"}
    except Exception as error:
        traceback.print_exc()
        report = {"framework": framework, "error": f"{type(error).__name__}: {str(error).strip()[-300:]}"}
    print(json.dumps(report), flush=True)
    sys.exit(1 if "error" in report else 0)
