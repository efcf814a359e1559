"""Numba's CUDA kernels."""

from common import main, refusal


def ask(over):
    import numpy

    # NumPy 2.5 removed it, and older Numba still uses it.
    if not hasattr(numpy, "row_stack"):
        numpy.row_stack = numpy.vstack

    import numba
    from numba import cuda

    @cuda.jit
    def double(values):
        at = cuda.grid(1)
        if at < values.size:
            values[at] *= 2

    def computes():
        values = cuda.to_device(numpy.arange(4096, dtype=numpy.float32))
        double[16, 256](values)
        return bool((values.copy_to_host() == 2 * numpy.arange(4096)).all())

    devices = []
    for ordinal in range(len(cuda.gpus)):
        with cuda.gpus[ordinal]:
            device = cuda.get_current_device()
            name = device.name.decode() if isinstance(device.name, bytes) else device.name
            seen = {"name": name, "sm": device.MULTIPROCESSOR_COUNT}
            seen["free_mib"] = cuda.current_context().get_memory_info().free >> 20
            seen["correct"] = computes()
            if over:
                take = lambda: cuda.device_array(over << 20, dtype=numpy.uint8)
                seen["refused"] = refusal(take, lambda error: "OUT_OF_MEMORY" in str(error))
                seen["after"] = computes()
            devices.append(seen)
    return numba.__version__, devices


if __name__ == "__main__":
    main("Numba", ask)
