"""A program with an error of its own: after WAIT seconds its kernel writes to an address where nothing is, and it stays for SECS:
`illegal.py WAIT SECS`. It prints a JSON line with what the driver says of it.
"""

import ctypes
import json
import sys
import time

from common import Driver

KERNEL = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry bad()
{
    .reg .b64 %address;
    .reg .b32 %word;
    mov.u64 %address, 16;
    mov.u32 %word, 7;
    st.global.u32 [%address], %word;
    ret;
}
"""


def main(wait, seconds):
    driver = Driver()
    driver.context(0)
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(module), KERNEL)
    driver.call("cuModuleGetFunction", ctypes.byref(kernel), module, b"bad")
    time.sleep(wait)
    try:
        driver.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        driver.call("cuCtxSynchronize")
        result = "CUDA_SUCCESS"
    except RuntimeError as error:
        result = str(error)
    print(json.dumps({"event": "fault", "result": result}), flush=True)
    time.sleep(seconds)


main(float(sys.argv[1]), float(sys.argv[2]))
