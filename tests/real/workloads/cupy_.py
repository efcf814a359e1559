"""CuPy."""

from common import main, refusal


def computes(cupy):
    ones = cupy.ones((1024, 1024), dtype=cupy.float32)
    return float((ones @ ones).sum()) == 1024.0**3


def ask(over):
    import cupy

    devices = []
    for ordinal in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(ordinal) as device:
            seen = {"name": cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode()}
            seen["sm"] = device.attributes["MultiProcessorCount"]
            seen["free_mib"] = cupy.cuda.runtime.memGetInfo()[0] >> 20
            seen["correct"] = computes(cupy)
            if over:
                take = lambda: cupy.empty(over << 20, dtype=cupy.uint8)
                seen["refused"] = refusal(take, lambda error: isinstance(error, cupy.cuda.memory.OutOfMemoryError))
                seen["after"] = computes(cupy)
            devices.append(seen)
    return cupy.__version__, devices


if __name__ == "__main__":
    main("CuPy", ask)
