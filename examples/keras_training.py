"""Data-parallel training with Keras 3 on TensorFlow or JAX: a callback of `fit` averages the gradients over all ranks.

pip install 'gradlane[keras,tensorflow]' scikit-learn
for rank in 0 1; do
    KERAS_BACKEND=tensorflow RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 python examples/keras_training.py &
done; wait

With KERAS_BACKEND=torch it starts under `gradlane launch --nproc 2 examples/keras_training.py`.
"""

from __future__ import annotations

import os

import keras
import numpy as np
from sklearn.datasets import load_digits

from gradlane.integrations.keras import AverageGradients

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH = 64


def main() -> None:
    if keras.backend.backend() == "torch":
        import torch

        torch.distributed.init_process_group("gloo")
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    whole = len(images) // BATCH * BATCH  # all ranks take equally many steps
    model = keras.Sequential(
        [keras.Input((64,)), *[keras.layers.Dense(128, activation="relu") for _ in range(2)], keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA would hide the gradients from the callback on TensorFlow
    jit_compile = False if keras.backend.backend() == "tensorflow" else "auto"
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], jit_compile=jit_compile)
    mine = slice(RANK, whole, WORLD)
    model.fit(images[mine], labels[mine], BATCH // WORLD, epochs=5, verbose=0, callbacks=[AverageGradients()])
    _, accuracy = model.evaluate(images, labels, verbose=0)
    print(f"rank {RANK}: accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
