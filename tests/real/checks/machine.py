"""Sets up the machine that the engines run on: sublet from its package, the image, the daemons."""

import json
import os
import shutil
import socket
import sysconfig
from pathlib import Path

from . import engines, process
from .table import Wrong

# Programs that containers call. Triton needs the compiler.
PROGRAMS = """bash sh dash env wc cat ls sleep true test mv mkdir rm grep head nproc id mount python3 python3.13 gcc cc cpp as ld
    ld.bfd vulkaninfo clinfo""".split()
MACHINE = sysconfig.get_config_var("MULTIARCH")
IMAGE, WORK = Path("/img"), Path("/srv/work")


class Machine:
    def __init__(self, given, checkout):
        self.given, self.checkout = given, Path(checkout)
        self.simulated = given["simulated"]
        self.storage = "vfs"
        self.docker = self.podman = self.serve = None
        self.sms = self.total_mib = 0

    def set_up(self):
        for directory in ("/run/lock", "/run/user", "/etc/sublet/conf.d", "/etc/docker", "/etc/containers", "/var/log"):
            os.makedirs(directory, exist_ok=True)
        self.storages()
        self.image()
        self.libraries()
        if self.simulated:
            self.driver()
        self.install()
        # All frameworks take turns beside what is looked at: more than the default of eight.
        Path("/etc/sublet/conf.d/tests-real.toml").write_text('[mps]\nexclusive_compute_mode = "never"\n[limits]\ntime_slice_max = 24\n')
        process.must(["sublet", "refresh"])
        self.engines()
        self.start_serve()
        self.total_mib = self.devices()[0]["memory_bytes"] >> 20
        # The memory of each framework's share, and how many such shares fit at once, with room for one more.
        self.memory_mib = min(8192, max(2048, self.total_mib // 10))
        room = self.total_mib * 9 // 10 // self.memory_mib - 1
        self.at_once = max(1, min(6, engines.cores() // 2, room))
        whole = report(self.podman.run({"gpu": "0", "mode": "time-slice"}, self.probe()))
        self.sms = whole["devices"][0]["sm"]

    def storages(self):
        """The root is on overlayfs, where only vfs works. So the engines' storage is on tmpfs, with overlayfs above that
        where the kernel can."""
        for directory in ("/var/lib/docker", "/var/lib/containers"):
            os.makedirs(directory, exist_ok=True)
            process.must(["mount", "-t", "tmpfs", "tmpfs", directory])
        probe = Path("/var/lib/containers/probe")
        for name in ("lower", "upper", "work", "at"):
            (probe / name).mkdir(parents=True)
        options = f"lowerdir={probe}/lower,upperdir={probe}/upper,workdir={probe}/work"
        if process.run(["mount", "-t", "overlay", "overlay", "-o", options, f"{probe}/at"]).ok:
            process.must(["umount", f"{probe}/at"])
            self.storage = "overlay"
        shutil.rmtree(probe)

    def image(self):
        """A small image of this root's files, made before ldconfig links the driver's libraries."""
        for directory in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/local", "etc", "proc", "sys", "dev", "tmp", "run", "root", "var/tmp", "opt"):
            (IMAGE / directory).mkdir(parents=True)
        for link in ("bin", "sbin", "lib", "lib64"):
            (IMAGE / link).symlink_to(f"usr/{link}")
        for directory in ("tmp", "var/tmp"):
            (IMAGE / directory).chmod(0o1777)
        wanted = [f"/usr/bin/{name}" for name in PROGRAMS]
        wanted += [str(path) for name in ("gcc*", "cpp*", "as", "ld*") for path in Path("/usr/bin").glob(f"{MACHINE}-{name}")]
        wanted += [str(path) for name in ("gcc-*", "cpp-*") for path in Path("/usr/bin").glob(name)]
        wanted += [f"/usr/lib/{MACHINE}", "/usr/lib64", "/usr/lib/gcc", "/usr/libexec/gcc", "/usr/include", "/usr/lib/linux", "/usr/lib/python3.13"]
        wanted += ["/etc/passwd", "/etc/group", "/etc/alternatives", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/usr/sbin/ldconfig"]
        present = [path for path in wanted if os.path.lexists(path)]
        process.must(["cp", "-a", "--parents", *present, str(IMAGE)])
        vendors = IMAGE / "etc/OpenCL/vendors"
        vendors.mkdir(parents=True)
        (vendors / "nvidia.icd").write_text("libnvidia-opencl.so.1\n")
        for bound in self.given["driver_files"]:
            (IMAGE / bound.lstrip("/")).unlink(missing_ok=True)
        # Libraries that the host's Python needs and this root lacks.
        for library in self.given["python_libraries"]:
            to = IMAGE / "usr/lib" / MACHINE / Path(library).name
            if not to.exists():
                shutil.copy(f"/host{library}", to)
        process.must(["chroot", str(IMAGE), "/sbin/ldconfig"])
        shutil.copytree(self.checkout / "tests/real/workloads", WORK)
        process.must(["chmod", "-R", "a+rX", str(WORK)])

    def libraries(self):
        """Makes the loader find the driver's libraries."""
        lines = "".join(f"{directory}\n" for directory in self.given["library_directories"])
        Path("/etc/ld.so.conf.d/tests-real.conf").write_text(lines)
        process.must(["ldconfig"])

    def driver(self):
        """Sets up a simulated driver, and puts its probe into the image."""
        topology = self.checkout / "tests/sim/topologies" / f"{self.given['topology']}.toml"
        said = process.must([f"{self.given['bin']}/sublet-sim", "up", "--topology", str(topology), "--root", "/srv/sim"])
        config = Path(said.splitlines()[-1]).read_text()
        kept = [line for line in config.splitlines() if not line.startswith("state_dir")]
        Path("/etc/sublet/config.toml").write_text("\n".join(kept) + "\n")
        shutil.copy("/srv/sim/usr/bin/cuda-probe", IMAGE / "usr/bin/cuda-probe")

    def install(self):
        if self.given["debs"]:
            Path("/etc/dpkg/dpkg.cfg.d/99mmdebstrap").unlink(missing_ok=True)
            process.must(["dpkg", "--force-depends", "-i", *self.given["debs"]])
            return
        built = Path(self.given["bin"])
        for name in ("sublet", "sublet-runtime"):
            shutil.copy(built / name, "/usr/bin")
        os.makedirs("/usr/libexec/sublet")
        os.symlink("../../bin/sublet-runtime", "/usr/libexec/sublet/sublet-hook")
        shutil.copy(built / "sublet-share", "/usr/libexec/sublet")
        os.makedirs("/usr/share/sublet/hooks.d")
        shutil.copy(self.checkout / "hooks/sublet.json", "/usr/share/sublet/hooks.d")
        os.makedirs("/etc/containers/containers.conf.d", exist_ok=True)
        shutil.copy(self.checkout / "hooks/containers.conf", "/etc/containers/containers.conf.d/sublet.conf")

    def engines(self):
        Path("/etc/containers/containers.conf").write_text(
            "[containers]\npids_limit = 0\nnetns = \"none\"\nlog_driver = \"k8s-file\"\n"
            "default_ulimits = [\"nofile=1024:1024\", \"nproc=4096:4096\"]\n"
            "[engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\nlock_type = \"file\"\n"
        )
        Path("/etc/containers/storage.conf").write_text(
            f"[storage]\ndriver = \"{self.storage}\"\nrunroot = \"/run/containers/storage\"\ngraphroot = \"/var/lib/containers/storage\"\n"
        )
        driver = "overlay2" if self.storage == "overlay" else "vfs"
        settings = {"iptables": False, "ip6tables": False, "bridge": "none", "userland-proxy": False, "storage-driver": driver}
        Path("/etc/docker/daemon.json").write_text(json.dumps(settings, indent=4) + "\n")
        process.must(["sublet", "setup", "docker"])
        self.start_dockerd()
        process.must(["tar", "-C", str(IMAGE), "-cf", "/srv/img.tar", "."])
        process.must(["docker", "import", "/srv/img.tar", "img"], 240)
        process.must(["podman", "import", "--quiet", "/srv/img.tar", "img"], 240)
        volumes = [f"{WORK}:/workloads:ro", *self.given["volumes"]]
        self.docker, self.podman = engines.Docker(volumes), engines.Podman(volumes)

    def start_dockerd(self):
        self.daemon = process.background(["dockerd"], "/tmp/dockerd.log")
        if not process.eventually(lambda: process.run(["docker", "info"], 10).ok, 60, 0.3):
            raise RuntimeError("dockerd does not answer: " + Path("/tmp/dockerd.log").read_text()[-600:])

    def facts(self):
        """The text of the table's heading."""
        one = lambda command: process.run(command).out.strip().splitlines()[:1] or [""]
        versions = [one(["sublet", "--version"]), one(["docker", "version", "--format", "Docker {{.Server.Version}}"]),
                    one(["podman", "--version"]), one(["runc", "--version"]), one(["crun", "--version"])]
        status = json.loads(process.must(["sublet", "status", "--format", "json"]))
        names = [device["name"] for device in status["devices"]]
        simulated = " (simulated)" if self.simulated else ""
        gpus = f"{len(names)} × {names[0]}, driver {status['driver']['version']}{simulated}"
        return f"{gpus}; " + ", ".join(version[0] for version in versions) + f"; storage {self.storage}\n"

    def start_serve(self):
        self.serve = process.background(["sublet", "serve"], "/tmp/serve.log")
        # One that was killed has left its socket.
        if not process.eventually(listens, 15):
            raise RuntimeError("sublet serve does not listen: " + Path("/tmp/serve.log").read_text()[-600:])

    def end_serve(self):
        self.serve.kill()
        self.serve.wait(10)

    def devices(self):
        return json.loads(process.must(["sublet", "status", "--format", "json"]))["devices"]

    def leases(self):
        return json.loads(process.must(["sublet", "lease", "list", "--format", "json"]))

    def count(self):
        return len(self.devices())

    def no_leases(self, seconds=10):
        """The leases that are left after a wait. There should be none."""
        process.eventually(lambda: not self.leases(), seconds)
        return self.leases()

    def clear(self):
        """Removes every container after a group."""
        for engine in (self.docker, self.podman):
            engine.remove_all()
        return self.no_leases()

    def expected_sms(self, percent):
        """The least and most SMs for a percentage. The driver rounds to whole pairs of SMs, and has a least number."""
        exact = self.sms * percent / 100
        return max(exact - 2, 2), exact + 0.001

    def sees_share(self, device, percent, mib):
        """Why a device does not show this share, or None if it does."""
        low, high = self.expected_sms(percent)
        if percent == 100:
            low = self.sms
        if not low <= device["sm"] <= max(high, 8):
            return f"{device['sm']} SMs"
        # The context counts towards the limit: up to half a GiB on a large GPU.
        if mib and not mib - 1100 <= device["free_mib"] <= mib:
            return f"{device['free_mib']} MiB free"
        return None

    def probe(self, over=None, processes=1):
        """The command that prints the driver's view."""
        if self.simulated:
            one = "cuda-probe info" + (f"; cuda-probe alloc {over}" if over else "")
            return ["sh", "-c", one if processes == 1 else f"({one}) & ({one}) & wait"]
        return workload("driver", over, processes)

    def hold(self, seconds, fill=False, mib=None):
        """The command that holds a context; with `fill` it takes all the memory that it gets."""
        if self.simulated:
            return ["cuda-probe", "alloc", str(mib - 600), str(seconds)] if fill else ["cuda-probe", "hold", str(seconds)]
        return ["python3", "/workloads/hold.py", str(seconds), *(["fill"] if fill else [])]

    def forms(self):
        """The command that prints the driver's view with CUDA_VISIBLE_DEVICES unset, 1, 1,0 and 0."""
        if self.simulated:
            forms = ["env -u CUDA_VISIBLE_DEVICES", *(f"env CUDA_VISIBLE_DEVICES={form}" for form in ("1", "1,0", "0"))]
            return ["sh", "-c", "; ".join(f"{form} cuda-probe info" for form in forms)]
        return ["python3", "/workloads/visible.py"]

    def cheat(self, mib, seconds):
        """The command that tampers with its memory limit."""
        if self.simulated:
            return ["sh", "-c", f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage cuda-probe alloc {mib} {seconds}"]
        return ["python3", "/workloads/cheat.py", str(mib), str(seconds)]

    def leader(self, mib, seconds, when, cheat):
        """The command that ends its first thread and computes in another one."""
        if self.simulated:
            spoilt = "export CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage; " if cheat else ""
            one = f"cuda-probe leaderless {'later' if when == 'context' else 'at-once'} alloc {mib} {seconds}"
            return ["sh", "-c", spoilt + {"child": f"{one} & wait", "children": f"{one} & {one} & wait"}.get(when, f"exec {one}")]
        return ["python3", "/workloads/leader.py", str(mib), str(seconds), when, *(["cheat"] if cheat else [])]


def listens():
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex("/run/sublet/sublet.sock") == 0


def workload(name, over=None, processes=1, python="python3"):
    words = [python, f"/workloads/{name}.py"]
    words += ["--over", str(over)] if over else []
    return words + (["--processes", str(processes)] if processes > 1 else [])


def simulated(lines):
    """cuda-probe's output in the form of a report. Each command of cuda-probe is a new process that prints its view."""
    shown = [line for line in lines if line["event"] == "info" and not line["error"]]
    refusals = [line["result"] for line in lines if line["event"] == "alloc"]
    devices = []
    for line in shown[: len(refusals) or None]:
        devices += [dict(line, name="simulated", correct=True, after=True) for _ in range(line["count"])]
    for device, result in zip(devices, refusals * len(devices)):
        device["refused"] = None if result == "CUDA_SUCCESS" else result
    error = next((line["error"] for line in lines if line.get("error")), "no device")
    return {"framework": "driver API", "version": "", "devices": devices} if devices else {"error": error}


def report(done):
    """The report that a workload printed. Raises `Wrong` if there is none."""
    lines = [engines.last_json(line) for line in done.out.splitlines()]
    lines = [line for line in lines if line]
    if lines and "event" in lines[-1]:
        lines = [simulated(lines)]
    if lines and "devices" in lines[-1] or lines and "skipped" in lines[-1]:
        return lines[-1]
    raise Wrong(lines[-1]["error"] if lines and "error" in lines[-1] else done.why())
