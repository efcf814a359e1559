"""No framework: the driver API."""

from common import Driver, main, refusal


def computes(driver):
    pointer = driver.take(1)
    driver.fill(pointer, 7, 1 << 18)
    right = driver.first(pointer, 1 << 18) == [7] * (1 << 18)
    driver.free(pointer)
    return right


def ask(over):
    driver = Driver()
    devices = []
    for ordinal in range(driver.count()):
        seen = driver.look(ordinal)
        seen["correct"] = computes(driver)
        if over:
            seen["refused"] = refusal(lambda: driver.take(over), lambda error: "OUT_OF_MEMORY" in str(error))
            seen["after"] = computes(driver)
        devices.append(seen)
    return "", devices


if __name__ == "__main__":
    main("driver API", ask)
