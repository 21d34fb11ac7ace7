"""One of two ranks that train a network in JAX or in TensorFlow with a loop of its own, by gradlane and by a plain all-reduce.

python -m tests.plugins.steps FRAMEWORK FILE PORT: leaves what it saw in FILE, as JSON; PORT is of the plain all-reduce.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from gradlane import policies
from gradlane.errors import PeerFailed
from gradlane.plugin.averaging import Averaging
from tests.plugins.early import most_sent_early
from tests.plugins.exchange import average, connect

RANK = int(os.environ.get("RANK", "0"))
WIDTH, LAYERS, STEPS, BATCH = 256, 11, 8, 64
NAMES = [f"layer{layer}" for layer in range(LAYERS)]  # sorted as a tree's keys, layer10 comes before layer2
POLICIES = {"mercury": "mercury", "bytescheduler": policies.get("bytescheduler", partition_bytes=60_000, credit_bytes=200_000)}
Arrays = dict[str, np.ndarray]


def weights_of(seed: int) -> Arrays:
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(16) for name in NAMES}


def batch(step: int) -> np.ndarray:
    return np.random.default_rng([step, RANK]).standard_normal((BATCH, WIDTH), np.float32)


class InJax:
    """Its parameters are a tree; `trained` returns them after some steps."""

    def start(self, policy: Any) -> Averaging:
        import jax.numpy as jnp

        from gradlane.plugin.jax import GradientAverage

        params = {name: jnp.asarray(value) for name, value in weights_of(seed=RANK).items()}
        scheduled = GradientAverage(params, policy=policy)
        self.params = scheduled.from_rank_0(params)
        return scheduled

    def start_plainly(self, other: Connection) -> Callable[[Any], Any]:
        import jax
        import jax.numpy as jnp
        from jax.experimental import io_callback

        self.params = {name: jnp.asarray(value) for name, value in weights_of(seed=0).items()}

        def averaged(gradients: Any) -> Any:
            leaves, tree = jax.tree.flatten(gradients)
            shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
            return jax.tree.unflatten(tree, io_callback(lambda *parts: average(other, parts), shapes, *leaves))

        return averaged

    def train(self, averaged: Callable[[Any], Any], steps: int = STEPS, compiled: bool = True) -> list[np.ndarray]:
        import jax
        import jax.numpy as jnp

        def loss_of(params: Any, x: Any) -> Any:
            for name in NAMES:
                x = jnp.tanh(x @ params[name])
            return (x * x).mean()

        def step(params: Any, x: Any) -> Any:
            gradients = averaged(jax.grad(loss_of)(params, x))
            return {name: params[name] - 0.1 * gradients[name] for name in NAMES}

        run = jax.jit(step) if compiled else step
        for number in range(steps):
            self.params = jax.block_until_ready(run(self.params, batch(number)))
        return [np.asarray(self.params[name]) for name in NAMES]


class InTensorFlow:
    """Its variables are a list, in the order of the layers."""

    def start(self, policy: Any) -> Averaging:
        import tensorflow as tf

        from gradlane.plugin.tensorflow import GradientAverage

        self.variables = [tf.Variable(value, name=name) for name, value in weights_of(seed=RANK).items()]
        scheduled = GradientAverage(self.variables, policy=policy)
        scheduled.from_rank_0(self.variables)
        return scheduled

    def start_plainly(self, other: Connection) -> Callable[[Any], Any]:
        import tensorflow as tf

        self.variables = [tf.Variable(value) for value in weights_of(seed=0).values()]

        def averaged(gradients: Sequence[Any]) -> Any:
            found = tf.numpy_function(lambda *parts: average(other, parts), gradients, [each.dtype for each in gradients])
            return [tf.ensure_shape(each, like.shape) for each, like in zip(found, gradients, strict=True)]

        return averaged

    def train(self, averaged: Callable[[Any], Any], steps: int = STEPS, compiled: bool = True) -> list[np.ndarray]:
        import tensorflow as tf

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                for variable in self.variables:
                    x = tf.tanh(x @ variable)
                loss = tf.reduce_mean(x * x)
            gradients = averaged(tape.gradient(loss, self.variables))
            for variable, gradient in zip(self.variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)

        run = tf.function(step) if compiled else step
        for number in range(steps):
            run(tf.constant(batch(number)))
        return [variable.numpy() for variable in self.variables]


def digest(arrays: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def give_up(program: InJax | InTensorFlow) -> str:
    """Rank 1 raises after two steps; what rank 0 then raises."""
    try:
        with program.start("mercury") as scheduled:
            program.train(scheduled, 2)
            if RANK == 1:
                raise ValueError("out of data")
            program.train(scheduled, 1)
    except (PeerFailed, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    framework, file, port = sys.argv[1:]
    program: Any = {"jax": InJax, "tensorflow": InTensorFlow}[framework]()
    found: dict[str, Any] = {"weights": {}, "early": {}, "order": {}}
    plain = program.start_plainly(connect(RANK, int(port)))
    found["plain"] = digest(program.train(plain))
    found["plain, not compiled"] = digest(program.train(plain, 2, compiled=False))
    for name, policy in POLICIES.items():
        with program.start(policy) as scheduled:
            found["weights"][name] = digest(program.train(scheduled))
            found["early"][name] = most_sent_early(scheduled.timeline())
            found["order"][name] = [spec.name for spec in scheduled.plan.tensors]
            if name == "mercury":
                found["weights"]["not compiled"] = digest(program.train(scheduled, 2, compiled=False))
    found["failure"] = give_up(program)
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
