"""Prints what a container needs of this Python: lines `python PROGRAM`, `take PATH` (directories and files that
have to be there at the same path), `library PATH` (what it is linked with), `has MODULE`.
"""

import glob
import importlib.util
import os
import subprocess
import sys
import sysconfig

MODULES = "torch jax flax cupy numba triton transformers tensorflow onnxruntime onnx cuda av".split()


def linked(files):
    out = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    found = {line.split("=>")[1].split()[0] for line in out.splitlines() if "=> /" in line}
    # The image has its own C library.
    own = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libutil.so", "ld-linux")
    return sorted(path for path in found if not os.path.basename(path).startswith(own))


def main():
    program = os.path.realpath(sys.executable)
    paths = sysconfig.get_paths()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    wanted = [program, sys.prefix, paths["stdlib"], paths["platstdlib"], sysconfig.get_paths(vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})["include"]]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch:
        wanted.append(f"{sys.base_prefix}/include/{multiarch}/{version}")
    wanted += [path for path in sys.path if path and os.path.isdir(path) and "site-packages" in path or "dist-packages" in path]
    if sys.base_prefix not in ("/usr", "/usr/local"):
        wanted.append(sys.base_prefix)
    # A virtual environment's python is a link, perhaps to a link.
    link = sys.executable
    while os.path.islink(link):
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        wanted.append(link)
    present = sorted({os.path.normpath(path) for path in wanted if os.path.exists(path)} - {"/usr", "/usr/local", "/"})
    taken = []
    for path in present:
        if not any(path.startswith(f"{whole}/") for whole in taken):
            taken.append(path)
    print("python", sys.executable)
    for path in taken:
        print("take", path)
    for path in linked([program, *glob.glob(f"{paths['platstdlib']}/lib-dynload/*.so")]):
        if not any(path.startswith(f"{whole}/") for whole in taken):
            print("library", path)
    for name in MODULES:
        if importlib.util.find_spec(name):
            print("has", name)


main()
