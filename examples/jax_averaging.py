"""Data-parallel training in JAX: one line of the compiled step averages the gradients over all ranks.

pip install 'gradlane[jax]'
for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 python examples/jax_averaging.py &
done; wait

Each rank trains on its part of every batch of handwritten digits.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from gradlane.plugin.jax import GradientAverage

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, BATCH, RATE = 101, 64, 0.2
SIZES = (64, 256, 128, 10)


def loss_of(params, x, labels):
    for layer, (weight, bias) in enumerate(params):
        x = x @ weight + bias
        if layer < len(params) - 1:
            x = jax.nn.relu(x)
    return -jax.nn.log_softmax(x)[jnp.arange(len(labels)), labels].mean()


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    keys = jax.random.split(jax.random.key(RANK), len(SIZES) - 1)
    params = [
        (jax.random.normal(key, (rows, columns)) / np.sqrt(rows), jnp.zeros(columns))
        for key, rows, columns in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]
    with GradientAverage(params) as average:
        params = average.from_rank_0(params)

        @jax.jit
        def step(params, x, labels):
            loss, gradients = jax.value_and_grad(loss_of)(params, x, labels)
            gradients = average(gradients)
            return jax.tree.map(lambda value, gradient: value - RATE * gradient, params, gradients), loss

        for number in range(STEPS):
            mine = np.random.default_rng(number).permutation(len(images))[:BATCH][RANK::WORLD]
            params, loss = step(params, images[mine], labels[mine])
            if number % 20 == 0 and RANK == 0:
                print(f"step {number}: loss {loss:.2f}")


if __name__ == "__main__":
    main()
