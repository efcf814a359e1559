"""YOLOS-small with random weights for SECS, started at the same time as others: `yolos.py SECS DIR ME`. It writes DIR/ready.ME, waits for
DIR/go, and prints count, mean, median and p99 of its iterations in ms.
"""

import json
import os
import statistics
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import YolosConfig, YolosForObjectDetection

seconds, barrier, me = float(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(0)
config = YolosConfig(
    hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536, image_size=[512, 864],
    patch_size=16, num_detection_tokens=100, use_mid_position_embeddings=False,
)
model = YolosForObjectDetection(config).cuda().eval()
image = torch.rand(1, 3, 512, 864, device="cuda")
taken = []
with torch.inference_mode():
    for _ in range(10):
        model(pixel_values=image)
    torch.cuda.synchronize()
    open(f"{barrier}/ready.{me}", "w").close()
    patience = time.monotonic() + 90
    while not os.path.exists(f"{barrier}/go") and time.monotonic() < patience:
        time.sleep(0.005)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        start = time.monotonic()
        model(pixel_values=image)
        torch.cuda.synchronize()
        taken.append((time.monotonic() - start) * 1e3)
taken.sort()
line = {"n": len(taken), "mean": statistics.mean(taken), "p50": taken[len(taken) // 2], "p99": taken[len(taken) * 99 // 100]}
print(json.dumps(line), flush=True)
