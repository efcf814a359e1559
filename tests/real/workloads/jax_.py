"""JAX. It does not report multiprocessors, so the driver's view is used, before JAX's pool takes the memory."""

from common import Driver, main, refusal


def computes(jax, device):
    ones = jax.device_put(jax.numpy.ones((1024, 1024)), device)
    product = ones @ ones
    return product.devices() == {device} and device.platform == "gpu" and float(product.sum()) == 1024.0**3


def is_oom(error):
    return "RESOURCE_EXHAUSTED" in str(error)


def devices_of(jax, compute, over):
    driver = Driver()
    looks = [driver.look(ordinal) for ordinal in range(driver.count())]
    devices = []
    # If JAX has fallen back to the CPU, it has no GPU to show.
    for look, device in zip(looks, jax.devices("gpu")):
        seen = dict(look, correct=compute(device), pool_mib=(device.memory_stats() or {}).get("bytes_limit", 0) >> 20)
        if over:
            take = lambda: jax.device_put(jax.numpy.zeros(over << 20, jax.numpy.uint8, device=device), device).block_until_ready()
            seen["refused"] = refusal(take, is_oom)
            seen["after"] = compute(device)
        devices.append(seen)
    return devices


def ask(over):
    import jax

    return jax.__version__, devices_of(jax, lambda device: computes(jax, device), over)


if __name__ == "__main__":
    main("JAX", ask)
