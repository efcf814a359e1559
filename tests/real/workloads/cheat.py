"""Tampers with its memory limit, takes MIB and holds it for SECS: `cheat.py MIB SECS`."""

import json
import os
import sys
import time

os.environ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = "garbage"

from common import Driver

driver = Driver()
driver.context(0)
held = [driver.take(1024) for _ in range(int(sys.argv[1]) // 1024)]
print(json.dumps({"event": "took", "mib": 1024 * len(held)}), flush=True)
time.sleep(float(sys.argv[2]))
print(json.dumps({"event": "never ended"}), flush=True)
