"""One interface to Docker, root's Podman and a user's Podman."""

import itertools
import json
import os

from . import process

# NVLink multicast stays off, and no framework uses the network.
ENVIRONMENT = [
    "NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NVSHMEM_DISABLE_NVLS=1", "HOME=/tmp", "LC_ALL=C.UTF-8",
    "PATH=/usr/local/cuda/bin:/usr/bin:/bin", "CUDA_HOME=/usr/local/cuda", "PYTHONDONTWRITEBYTECODE=1",
    "HF_HUB_OFFLINE=1", "TF_CPP_MIN_LOG_LEVEL=3",
]
numbers = itertools.count()


def annotations(share):
    """`--annotation sublet.KEY=VALUE` for each. Keys with a dot or an underscore are passed as they are."""
    keys = {key if "." in key or "_" in key else f"sublet.{key}": value for key, value in share.items()}
    return [word for key, value in keys.items() for word in ("--annotation", f"{key}={value}")]


class Engine:
    def __init__(self, name, program, options, volumes):
        self.name, self.program = name, program
        self.options = [*options, *(word for pair in ENVIRONMENT for word in ("--env", pair))]
        self.volumes = [word for volume in volumes for word in ("--volume", volume)]

    def call(self, *arguments, timeout=60):
        return process.run([*self.program, *arguments], timeout)

    def words(self, share, options):
        return [*self.options, *annotations(share), *self.volumes, *options]

    def run(self, share, command, options=(), timeout=120):
        """Runs one container to its end."""
        name = f"once{next(numbers)}"
        done = self.call("run", "--rm", "--name", name, *self.words(share, options), "img", *command, timeout=timeout)
        if done.status == 124:
            self.remove(name)
        return done

    def start(self, name, share, command, options=()):
        return self.call("run", "--detach", "--name", name, *self.words(share, options), "img", *command)

    def execute(self, name, command, timeout=120):
        return self.call("exec", name, *command, timeout=timeout)

    def logs(self, name):
        done = self.call("logs", name)
        return done.out + done.err

    def remove(self, *names):
        if names:
            self.call("rm", "--force", *names)

    def remove_all(self):
        self.remove(*self.call("ps", "--all", "--quiet").out.split())

    def state(self, name, member):
        return self.call("inspect", "--format", "{{" + member + "}}", name).out.strip()


class Docker(Engine):
    def __init__(self, volumes):
        super().__init__("docker", ["docker"], ["--network=none", "--runtime=sublet", "--shm-size=1g"], volumes)

    def health(self, command):
        """Options of a health check that runs only once. Two runs at the same time would exceed the share together."""
        once = f"test -s /tmp/health || ({command} >/tmp/health.new 2>/tmp/health.err; mv /tmp/health.new /tmp/health)"
        return ["--health-cmd", once, "--health-interval=1s", "--health-timeout=100s", "--health-retries=1"]

    def checked(self, name, seconds):
        """The health check's status and output, once the engine has run it."""
        process.eventually(lambda: self.state(name, ".State.Health.Status") != "starting", seconds, 0.3)
        status = self.state(name, ".State.Health.Status")
        done = process.run([*self.program, "exec", name, "cat", "/tmp/health"])
        return status, done


class Podman(Engine):
    def __init__(self, volumes, program=("podman",), name="podman"):
        # Exec and health checks get the container's variables, not the share's (docs/podman.md). Triton needs this one.
        triton = f"TRITON_LIBCUDA_PATH=/usr/lib/{os.uname().machine}-linux-gnu"
        options = ["--network=none", "--pids-limit=0", "--shm-size=1g", "--env", triton]
        super().__init__(name, list(program), options, volumes)

    def remove(self, *names):
        if names:
            self.call("rm", "--force", "--time=0", "--ignore", *names)

    def health(self, command):
        """Without systemd there is no timer. `checked` runs the health check instead."""
        return ["--health-cmd", f"{command} >/tmp/health 2>/tmp/health.err", "--health-interval=disable", "--health-timeout=100s"]

    def checked(self, name, seconds):
        ran = self.call("healthcheck", "run", name, timeout=seconds)
        done = process.run([*self.program, "exec", name, "cat", "/tmp/health"])
        return "healthy" if ran.ok else f"unhealthy ({ran.why()})", done


def rootless(user, uid, environment):
    """The user's own Podman."""
    setpriv = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "env", "-i", "-C", f"/home/{user}"]
    words = [f"{key}={value}" for key, value in environment.items()]
    return Podman([], [*setpriv, *words, "podman", "--cgroup-manager=cgroupfs"], "podman, rootless")


def last_json(text):
    """The last line that is a JSON object, or None."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return None


def cores():
    return len(os.sched_getaffinity(0))
