"""Data-parallel training in JAX, its gradients scheduled by gradlane from inside one compiled step. Experimental.

pip install 'gradlane[jax]'
python examples/jax_training.py

As numpy_training.py, whose digits, plan and meeting it uses. XLA knows neither gradlane nor a network: the step calls out
(`io_callback`) where a gradient is ready and where a layer needs the sum of its own. What a callback is given decides when
XLA can run it, so a layer's wait is given what the layer before has computed.
"""

from __future__ import annotations

import functools
from multiprocessing.connection import Connection

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from numpy_training import LAYERS, RATE, STEPS, WORLD, batch, meet, parameters, the_plan, train_in_processes

from gradlane.plugin import Core, NodeSums

# a callback that reads its arguments would wait for the thread that it is called from
jax.config.update("jax_cpu_enable_async_dispatch", False)


def loss_of(weights, x, labels, layer_weights=lambda weights, layer, x: weights[layer]):
    for layer in range(LAYERS):
        x = jnp.hstack([x, jnp.ones((len(x), 1), x.dtype)]) @ layer_weights(weights, layer, x)
        if layer < LAYERS - 1:
            x = jax.nn.relu(x)
    return -jax.nn.log_softmax(x)[jnp.arange(len(labels)), labels].mean()


def scheduled_step(core: Core, sums: list[np.ndarray]):
    """A compiled step: update each layer where it is used, and hand out each gradient where it is there."""

    def ready(layer: int, gradient) -> None:
        tensor = LAYERS - 1 - layer
        sums[tensor][:] = np.asarray(gradient)
        core.notify_ready(tensor)

    def wait(layer: int, _) -> np.ndarray:
        core.wait(LAYERS - 1 - layer)
        total = sums[LAYERS - 1 - layer].copy()
        if layer == LAYERS - 1:
            core.begin()  # the last sum is in use, and no gradient has been handed out yet
        return total

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def handed_out(layer: int, weight):
        return weight

    def told(layer: int, _, gradient):
        io_callback(functools.partial(ready, layer), None, gradient)
        return (gradient,)

    handed_out.defvjp(lambda layer, weight: (weight, None), told)

    def step(weights, x, labels, is_first):
        updated = list(weights)

        def loss(weights):
            def up_to_date(weights, layer: int, x):
                weight = weights[layer]
                if not is_first:
                    like = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
                    total = io_callback(functools.partial(wait, layer), like, jax.lax.stop_gradient(x[0, 0]))
                    weight = weight - RATE / WORLD * total
                updated[layer] = jax.lax.stop_gradient(weight)
                return handed_out(layer, weight)

            return loss_of(weights, x, labels, up_to_date), updated

        (value, new), _ = jax.value_and_grad(loss, has_aux=True)(weights)
        return new, value

    return jax.jit(step, static_argnames="is_first")


def worker(rank: int, parent: Connection) -> None:
    weights = parameters()
    plan = the_plan(weights)
    sums = [np.zeros_like(weights[LAYERS - 1 - tensor]) for tensor in range(LAYERS)]  # in the plan's order: last layer first
    summation = NodeSums(meet(rank, parent, plan), sums)
    core = Core(plan, summation)
    step = scheduled_step(core, sums)
    weights, losses = [jnp.asarray(weight) for weight in weights], []
    core.begin()
    for number in range(STEPS):
        weights, loss = step(weights, *batch(number, rank), is_first=number == 0)
        losses.append(float(loss))
    core.wait_for_all()
    trained = [np.asarray(weight) - RATE / WORLD * sums[LAYERS - 1 - layer] for layer, weight in enumerate(weights)]
    summation.close()
    parent.send((losses, trained))


def alone() -> list[np.ndarray]:
    """The same training in one process, which does every rank's part one after another."""
    gradients_of = jax.jit(jax.grad(loss_of))
    weights = [jnp.asarray(weight) for weight in parameters()]
    for number in range(STEPS):
        parts = [gradients_of(weights, *batch(number, rank)) for rank in range(WORLD)]
        weights = [weight - RATE / WORLD * sum(each) for weight, *each in zip(weights, *parts, strict=True)]
    return [np.asarray(weight) for weight in weights]


def main() -> None:
    trained = train_in_processes(worker)
    expected = alone()
    furthest = max(
        float(np.abs(one - other).max()) for weights in trained for one, other in zip(weights, expected, strict=True)
    )
    equal = all(np.array_equal(one, other) for one, other in zip(*trained, strict=True))
    print(f"weights {'equal' if equal else 'differ'} on both ranks, and within {furthest:.1e} of those of one process")


if __name__ == "__main__":
    main()
