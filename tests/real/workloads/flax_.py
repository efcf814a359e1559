"""Flax: a layer with known weights."""

from common import main
from jax_ import devices_of


def ask(over):
    import flax
    import jax
    from flax import linen

    def computes(device):
        layer = linen.Dense(8)
        weights = {"params": {"kernel": jax.numpy.ones((64, 8)), "bias": jax.numpy.ones(8)}}
        out = layer.apply(jax.device_put(weights, device), jax.device_put(jax.numpy.ones((4, 64)), device))
        return out.devices() == {device} and bool((out == 65.0).all())

    return flax.__version__, devices_of(jax, computes, over)


if __name__ == "__main__":
    main("Flax", ask)
