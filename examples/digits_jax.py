"""Train a small network on handwritten digits with JAX and optax: flockstep launch -n 2 digits_jax.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import flockstep
import flockstep.jax

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
first, second = jax.random.split(jax.random.key(0))
params = {
    "hidden": {"w": jax.random.normal(first, (64, 128)) / 8, "b": jnp.zeros(128)},
    "out": {"w": jax.random.normal(second, (128, 10)) / 128**0.5, "b": jnp.zeros(10)},
}


def logits(params, x):
    """Outputs of the network for a batch of images."""
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


@jax.jit
def gradients(params, x, y):
    """Gradients of the mean loss of a batch, compiled; the strategy's step is outside of `jax.jit`."""
    return jax.grad(lambda p: optax.softmax_cross_entropy_with_integer_labels(logits(p, x), y).mean())(params)


trainer = flockstep.jax.distribute(params, optax.sgd(0.1, momentum=0.5), "local_sgd(period=8)")
params = trainer.params  # those of rank 0
for epoch in range(15):
    order = np.random.default_rng(epoch).permutation(1437)  # the same on every rank
    for batch in flockstep.shard(np.split(order[:1408], 44)):
        params = trainer.step(gradients(params, images[batch], labels[batch]))
params = trainer.finish()

accuracy = (logits(params, images[1437:]).argmax(1) == labels[1437:]).mean()
if flockstep.is_main():
    print(f"test accuracy {accuracy:.3f}")
