"""YOLOS-small with random weights, again and again: prints the milliseconds of each iteration, for `sublet bench`. The model has the
shape of hustvl/yolos-small, and the picture that of the published comparison of GPU sharing: 1 x 3 x 512 x 864.
"""

import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import YolosConfig, YolosForObjectDetection

torch.manual_seed(0)
config = YolosConfig(
    hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536, image_size=[512, 864],
    patch_size=16, num_detection_tokens=100, use_mid_position_embeddings=False,
)
model = YolosForObjectDetection(config).cuda().eval()
picture = torch.rand(1, 3, 512, 864, device="cuda")
with torch.inference_mode():
    for _ in range(10):
        model(pixel_values=picture)
    torch.cuda.synchronize()
    while True:
        start = time.perf_counter()
        model(pixel_values=picture)
        torch.cuda.synchronize()
        print(f"{(time.perf_counter() - start) * 1e3:.4f}", flush=True)
