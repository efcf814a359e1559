"""Transformers: a small YOLOS with random weights, compared with the CPU."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from common import main
from torch_ import devices_of


def ask(over):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.YolosConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=192, image_size=[64, 96],
        patch_size=16, num_detection_tokens=10, use_mid_position_embeddings=False,
    )
    model = transformers.YolosForObjectDetection(config).eval()
    image = torch.rand(1, 3, 64, 96)
    with torch.inference_mode():
        right = model(pixel_values=image).logits

    def computes(device):
        with torch.inference_mode():
            out = model.to(device)(pixel_values=image.to(device)).logits
        return out.is_cuda and bool(torch.allclose(out.cpu(), right, atol=1e-2, rtol=1e-2))

    return transformers.__version__, devices_of(torch, computes, over)


if __name__ == "__main__":
    main("Transformers", ask)
