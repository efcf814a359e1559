"""NCCL all-reduce over two GPUs by PyTorch, one process a GPU. NVLink multicast stays off."""

import json
import os
import time

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")


def worker(rank):
    import torch
    import torch.distributed

    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2)
    values = torch.full((1 << 24,), float(rank + 1), device="cuda")
    torch.distributed.all_reduce(values)
    right = bool((values == 3.0).all())
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(20):
        torch.distributed.all_reduce(values)
    torch.cuda.synchronize()
    speed = 20 * (1 << 26) / (time.monotonic() - start) / 1e9
    if rank == 0:
        print(json.dumps({"correct": right, "gb_per_s": round(speed, 1)}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing

    torch.multiprocessing.spawn(worker, nprocs=2)
