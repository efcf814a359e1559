"""TensorFlow. It does not report multiprocessors, so the driver's view is used."""

from common import Driver, Skip, main, refusal


def ask(over):
    import tensorflow

    driver = Driver()
    looks = [driver.look(ordinal) for ordinal in range(driver.count())]
    found = tensorflow.config.list_physical_devices("GPU")
    if not tensorflow.test.is_built_with_cuda():
        raise Skip(f"tensorflow {tensorflow.__version__} was built without CUDA")
    for device in found:
        tensorflow.config.experimental.set_memory_growth(device, True)
    devices = []
    for ordinal, (look, _) in enumerate(zip(looks, found)):

        def computes():
            with tensorflow.device(f"GPU:{ordinal}"):
                ones = tensorflow.ones((1024, 1024))
                product = ones @ ones
                return "GPU" in product.device and float(tensorflow.reduce_sum(product)) == 1024.0**3

        def take():
            with tensorflow.device(f"GPU:{ordinal}"):
                tensorflow.zeros(over << 20, tensorflow.uint8)

        seen = dict(look, correct=computes())
        if over:
            seen["refused"] = refusal(take, lambda error: isinstance(error, tensorflow.errors.ResourceExhaustedError))
            seen["after"] = computes()
        devices.append(seen)
    return tensorflow.__version__, devices


if __name__ == "__main__":
    main("TensorFlow", ask)
