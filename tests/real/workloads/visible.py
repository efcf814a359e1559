"""The driver's view under each way in which a program of several workers sets CUDA_VISIBLE_DEVICES itself."""

import json
import os
import subprocess
import sys

from common import Driver

if len(sys.argv) > 1:
    driver = Driver()
    print(json.dumps([driver.look(ordinal) for ordinal in range(driver.count())]))
    sys.exit()
seen = {}
for form in [None, "1", "1,0", "0"]:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if form:
        environment["CUDA_VISIBLE_DEVICES"] = form
    done = subprocess.run([sys.executable, sys.argv[0], "one"], env=environment, capture_output=True, text=True, timeout=60)
    seen[form or "none"] = json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip().splitlines()[-1:]
print(json.dumps(seen), flush=True)
