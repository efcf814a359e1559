"""Vulkan and OpenCL: vulkaninfo and clinfo say in a container what they say on this host. As images for OpenCL do, this one
brings the name of NVIDIA's library, because hosts need not have it."""

import os
import re
from pathlib import Path

from . import process
from .machine import IMAGE
from .table import Rows, Wrong

# What each GPU is, without what the memory's use changes.
VULKAN = r"^\s*(apiVersion|driverVersion|deviceName|deviceUUID|driverName|driverInfo)\s*=\s*(.*?)\s*$"
OPENCL = r"^\[NV\S*\]\s+(CL_DEVICE_(?:NAME|VERSION|MAX_COMPUTE_UNITS|GLOBAL_MEM_SIZE))\s+(.*?)\s*$"
ASKED = [("vulkaninfo --summary", ["vulkaninfo", "--summary"], VULKAN), ("clinfo", ["clinfo", "--raw"], OPENCL)]


def graphics(table, group, machine):
    """Each program in a container that has the whole GPU, beside the same program on the host."""
    if machine.simulated:
        return Rows(table, group).skip("Vulkan and OpenCL", "the driver is simulated")
    for job, engine in enumerate((machine.docker, machine.podman)):
        rows = Rows(table, group, job, engine.name)
        for title, command, wanted in ASKED:
            def look():
                host = said(process.run(command, env=host_environment(machine)), wanted)
                seen = said(engine.run({"gpu": "0", "mode": "time-slice"}, command, ["--env", "NVIDIA_DRIVER_CAPABILITIES=all"]), wanted)
                different = [f"{key}: {value} (host: {host.get(key)})" for key, value in seen.items() if host.get(key) != value]
                missing = sorted(set(host) - set(seen))
                return "; ".join(different + missing) or ", ".join(seen.values()), not different and not missing

            rows.ask(title, "as on the host", look, 20)


def host_environment(machine):
    """The driver's description files lie where the loaders look, or beside its libraries."""
    environment = dict(os.environ, OCL_ICD_VENDORS=str(IMAGE / "etc/OpenCL/vendors"))
    for variable, below in [("VK_DRIVER_FILES", "vulkan/icd.d"), ("__EGL_VENDOR_LIBRARY_FILENAMES", "glvnd/egl_vendor.d")]:
        beside = [Path(directory).parent / "share" / below for directory in machine.given["library_directories"]]
        if found := [str(file) for directory in beside for file in directory.glob("*.json")]:
            environment[variable] = ":".join(found)
    return environment


def said(done, wanted):
    """What a program said of the NVIDIA GPU, by name."""
    found = {}
    for line in done.out.splitlines():
        if match := re.match(wanted, line):
            found.setdefault(match[1], match[2])
    if not found:
        raise Wrong(done.why() or done.out[-300:])
    return found
