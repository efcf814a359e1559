"""Keeps MIB of GPU memory in which each word is known, and checks all of it on the GPU without a pause, for SECS:
`keep.py MIB SECS [managed] [idle]`. With `managed` it is managed memory (cuMemAllocManaged); with `idle` it pauses between checks.

It prints JSON lines: one when it has a context, and one every 0.1 s with the number of checks, whether every word was right in
all of them, and the GPU that this process takes itself to be on.
"""

import ctypes
import json
import sys
import time

from common import Driver

# Word i is i * 0x9E3779B1 + seed. `put` writes them, `count` counts those that are not so.
KERNELS = b"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry put(.param .u64 at, .param .u64 words, .param .u32 seed)
{
    .reg .pred %end;
    .reg .b32 %r<8>;
    .reg .b64 %d<8>;
    ld.param.u64 %d1, [at];
    ld.param.u64 %d2, [words];
    ld.param.u32 %r1, [seed];
    cvta.to.global.u64 %d1, %d1;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mov.u32 %r5, %nctaid.x;
    mul.wide.u32 %d3, %r2, %r3;
    cvt.u64.u32 %d4, %r4;
    add.u64 %d3, %d3, %d4;
    mul.wide.u32 %d5, %r5, %r3;
NEXT:
    setp.ge.u64 %end, %d3, %d2;
    @%end bra DONE;
    cvt.u32.u64 %r6, %d3;
    mad.lo.u32 %r6, %r6, 0x9E3779B1, %r1;
    shl.b64 %d6, %d3, 2;
    add.u64 %d6, %d6, %d1;
    st.global.u32 [%d6], %r6;
    add.u64 %d3, %d3, %d5;
    bra NEXT;
DONE:
    ret;
}

.visible .entry count(.param .u64 at, .param .u64 words, .param .u32 seed, .param .u64 wrong)
{
    .reg .pred %end, %other;
    .reg .b32 %r<10>;
    .reg .b64 %d<9>;
    ld.param.u64 %d1, [at];
    ld.param.u64 %d2, [words];
    ld.param.u32 %r1, [seed];
    ld.param.u64 %d7, [wrong];
    cvta.to.global.u64 %d1, %d1;
    cvta.to.global.u64 %d7, %d7;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mov.u32 %r5, %nctaid.x;
    mov.u32 %r8, 1;
    mul.wide.u32 %d3, %r2, %r3;
    cvt.u64.u32 %d4, %r4;
    add.u64 %d3, %d3, %d4;
    mul.wide.u32 %d5, %r5, %r3;
NEXT:
    setp.ge.u64 %end, %d3, %d2;
    @%end bra DONE;
    cvt.u32.u64 %r6, %d3;
    mad.lo.u32 %r6, %r6, 0x9E3779B1, %r1;
    shl.b64 %d6, %d3, 2;
    add.u64 %d6, %d6, %d1;
    ld.global.u32 %r7, [%d6];
    setp.ne.u32 %other, %r7, %r6;
    @%other red.global.add.u32 [%d7], %r8;
    add.u64 %d3, %d3, %d5;
    bra NEXT;
DONE:
    ret;
}
"""
BLOCKS, THREADS = 2048, 256
# Allocations of at most so many MiB.
PIECE = 1024
ATTACH_GLOBAL = 1
# Seconds between two checks of one that is idle.
PAUSE = 5


class Kernels:
    def __init__(self, driver):
        self.driver, self.module = driver, ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(self.module), ctypes.c_char_p(KERNELS))
        self.put, self.count = self.function(b"put"), self.function(b"count")

    def function(self, name):
        found = ctypes.c_void_p()
        self.driver.call("cuModuleGetFunction", ctypes.byref(found), self.module, ctypes.c_char_p(name))
        return found

    def launch(self, function, *arguments):
        pointers = [ctypes.cast(ctypes.pointer(argument), ctypes.c_void_p) for argument in arguments]
        given = (ctypes.c_void_p * len(pointers))(*pointers)
        self.driver.call("cuLaunchKernel", function, BLOCKS, 1, 1, THREADS, 1, 1, 0, None, given, None)


def say(**line):
    print(json.dumps(line), flush=True)


def uuid(driver):
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    driver.call("cuDeviceGet", ctypes.byref(device), 0)
    driver.call("cuDeviceGetUuid_v2", found, device)
    text = bytes(found).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def taken(driver, mib, is_managed):
    if not is_managed:
        return driver.take(mib)
    pointer = ctypes.c_uint64()
    driver.call("cuMemAllocManaged", ctypes.byref(pointer), ctypes.c_size_t(mib << 20), ATTACH_GLOBAL)
    return pointer


def main(mib, seconds, is_managed, is_idle):
    driver = Driver()
    say(event="info", error=None, uuid=uuid(driver), **driver.look(0))
    kernels = Kernels(driver)
    sizes = [min(PIECE, mib - start) for start in range(0, mib, PIECE)]
    pieces = [(taken(driver, size, is_managed), ctypes.c_uint64(size << 18), ctypes.c_uint(seed)) for seed, size in enumerate(sizes)]
    wrong = driver.take(1)
    driver.fill(wrong, 0, 1)
    for piece in pieces:
        kernels.launch(kernels.put, *piece)
    checks, until, told = 0, time.monotonic() + seconds, 0.0
    while time.monotonic() < until:
        for piece in pieces:
            kernels.launch(kernels.count, *piece, wrong)
        driver.call("cuCtxSynchronize")
        checks += 1
        if time.monotonic() - told > 0.1:
            told = time.monotonic()
            say(event="round", n=checks, equal=driver.first(wrong, 1) == [0], uuids=[uuid(driver)])
        if is_idle:
            time.sleep(PAUSE)
    say(event="end", result="CUDA_SUCCESS")


main(int(sys.argv[1]), float(sys.argv[2]), "managed" in sys.argv[3:], "idle" in sys.argv[3:])
