"""A Triton kernel. Triton needs a C compiler for its launcher."""

import torch
import triton
import triton.language as tl

from common import main
from torch_ import devices_of


@triton.jit
def add(left, right, out, size, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    tl.store(out + at, tl.load(left + at, mask=inside) + tl.load(right + at, mask=inside), mask=inside)


def ask(over):
    def computes(device):
        left = torch.arange(5000, device=device, dtype=torch.float32)
        out = torch.empty_like(left)
        add[(triton.cdiv(5000, 256),)](left, left, out, 5000, block=256)
        return bool((out == 2 * left).all())

    return triton.__version__, devices_of(torch, computes, over)


if __name__ == "__main__":
    main("Triton", ask)
