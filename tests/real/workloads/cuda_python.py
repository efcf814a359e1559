"""CUDA Python: NVIDIA's own bindings."""

from common import main, refusal


def ask(over):
    from importlib.metadata import version

    from cuda.bindings import driver

    def call(result):
        code, *values = result
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(code.name)
        return values[0] if len(values) == 1 else values

    def computes():
        pointer = call(driver.cuMemAlloc(1 << 20))
        call(driver.cuMemsetD8(pointer, 7, 1 << 20))
        out = bytearray(1 << 20)
        call(driver.cuMemcpyDtoH(out, pointer, 1 << 20))
        call(driver.cuMemFree(pointer))
        return out == b"\7" * (1 << 20)

    call(driver.cuInit(0))
    devices = []
    for ordinal in range(call(driver.cuDeviceGetCount())):
        device = call(driver.cuDeviceGet(ordinal))
        call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(device))))
        sm = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        seen = {"name": call(driver.cuDeviceGetName(100, device)).split(b"\0")[0].decode()}
        seen["sm"] = call(driver.cuDeviceGetAttribute(sm, device))
        seen["free_mib"] = call(driver.cuMemGetInfo())[0] >> 20
        seen["correct"] = computes()
        if over:
            seen["refused"] = refusal(lambda: call(driver.cuMemAlloc(over << 20)), lambda error: "OUT_OF_MEMORY" in str(error))
            seen["after"] = computes()
        devices.append(seen)
    return version("cuda-bindings"), devices


if __name__ == "__main__":
    main("CUDA Python", ask)
