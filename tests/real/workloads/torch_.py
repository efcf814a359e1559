"""PyTorch."""

from common import main, refusal


def devices_of(torch, computes, over):
    devices = []
    for ordinal in range(torch.cuda.device_count()):
        with torch.cuda.device(ordinal):
            device = f"cuda:{ordinal}"
            found = torch.cuda.get_device_properties(ordinal)
            seen = {"name": found.name, "sm": found.multi_processor_count}
            seen["free_mib"] = torch.cuda.mem_get_info(ordinal)[0] >> 20
            seen["correct"] = computes(device)
            if over:
                take = lambda: torch.empty(over << 20, dtype=torch.uint8, device=device)
                seen["refused"] = refusal(take, lambda error: isinstance(error, torch.OutOfMemoryError))
                seen["after"] = computes(device)
            devices.append(seen)
    return devices


def ask(over):
    import torch

    def computes(device):
        ones = torch.ones((1024, 1024), device=device)
        product = ones @ ones
        return product.is_cuda and product.sum().item() == 1024.0**3

    return torch.__version__, devices_of(torch, computes, over)


if __name__ == "__main__":
    main("PyTorch", ask)
