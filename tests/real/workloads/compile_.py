"""torch.compile with Inductor, which writes Triton kernels."""

import os

# No pool of compiler processes, because they would count as the container's processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from common import main
from torch_ import devices_of


def ask(over):
    import torch

    def plain(values):
        return (values * 2 + 1).relu().sum(dim=1)

    compiled = torch.compile(plain)

    def computes(device):
        values = torch.arange(1 << 16, device=device, dtype=torch.float32).reshape(256, 256) % 7 - 3
        return bool(torch.allclose(compiled(values), plain(values)))

    return torch.__version__, devices_of(torch, computes, over)


if __name__ == "__main__":
    main("torch.compile", ask)
