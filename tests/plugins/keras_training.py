"""One of two ranks that train a Keras model with `fit`, by gradlane or by a plain all-reduce: KERAS_BACKEND says on what.

python -m tests.plugins.keras_training FILE PORT: leaves what it saw in FILE, as JSON; PORT is of the plain all-reduce.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import gradlane
from gradlane.errors import GradlaneError
from gradlane.integrations.keras import AverageGradients
from tests.plugins.early import most_sent_early
from tests.plugins.exchange import average, connect

RANK = int(os.environ["RANK"])
BACKEND = keras.backend.backend()
WIDTH = 256


def model_of(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(5)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.BatchNormalization(), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=False if BACKEND == "tensorflow" else "auto")
    return model


def fit(model: Any, callbacks: list[Any]) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((512, WIDTH), np.float32), draw.standard_normal((512, 4), np.float32)
    model.fit(x[RANK::2], y[RANK::2], batch_size=32, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)


def reduced_plainly(model: Any, port: int) -> None:
    """The optimizer averages over a pipe before it applies."""
    other, apply = connect(RANK, port), model.optimizer.apply

    def averaged(grads: Any) -> Any:
        if BACKEND == "torch":
            import torch

            return [torch.from_numpy(each) for each in average(other, [each.numpy() for each in grads])]
        if BACKEND == "jax":
            import jax
            from jax.experimental import io_callback

            shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in grads]
            return io_callback(lambda *gradients: average(other, gradients), shapes, *grads)
        import tensorflow as tf

        found = tf.numpy_function(lambda *gradients: average(other, gradients), grads, [each.dtype for each in grads])
        return [tf.ensure_shape(each, like.shape) for each, like in zip(found, grads, strict=True)]

    model.optimizer.apply = lambda grads, variables=None: apply(averaged(grads), variables)


def refusals() -> list[str]:
    """What gradlane says to what it cannot do."""
    model, said = model_of(seed=0), []

    def note(call: Any) -> None:
        try:
            call()
        except GradlaneError as error:
            said.append(f"{type(error).__name__}: {error}")

    if BACKEND == "torch":
        note(lambda: gradlane.attach(model, model.optimizer))
    elif BACKEND == "tensorflow":
        model.compile("sgd", "mse", jit_compile=True)
        note(lambda: fit(model, [AverageGradients()]))
    else:
        note(lambda: fit(model, [AverageGradients(), AverageGradients()]))
    return said


def digest(values: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(keras.ops.convert_to_numpy(value)).tobytes() for value in values)).hexdigest()


def main() -> None:
    file, port = sys.argv[1:]
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
    scheduled, plain = model_of(seed=RANK), model_of(seed=0)
    options = {"policy": "wfbp"} if BACKEND == "torch" else {}
    refused = refusals()
    callback = AverageGradients(**options)
    fit(scheduled, [callback])
    reduced_plainly(plain, int(port))
    fit(plain, [])
    found = {
        "weights": digest(scheduled.weights),
        "trained": digest(scheduled.trainable_weights),
        "momenta": digest(scheduled.optimizer.variables[2:]),
        "plain": digest(plain.trainable_weights),
        "plain momenta": digest(plain.optimizer.variables[2:]),
        "sent before the last was ready": most_sent_early(callback.timeline()),
        "restored": "apply" not in vars(scheduled.optimizer),
        "refused": refused,
    }
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
