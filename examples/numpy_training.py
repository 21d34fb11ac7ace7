"""Data-parallel training in NumPy alone, its gradients scheduled by gradlane: what a plugin for a framework looks like.

python examples/numpy_training.py

Two processes train a small network on handwritten digits, each on half of every batch. Gradients leave as soon as
backward has them, in slices, the first layers' first; the next forward pass waits for each layer where it needs it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
from sklearn.datasets import load_digits

from gradlane import policies
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.planning.plans import make_plan
from gradlane.plugin import Core, NodeSums
from gradlane.transport import Node, NodeOptions

WORLD, STEPS, BATCH, RATE = 2, 101, 64, 0.2
SIZES = (64, 256, 128, 10)
LAYERS = len(SIZES) - 1


def parameters() -> list[np.ndarray]:
    """A matrix a layer, with the bias as its last row."""
    draw = np.random.default_rng(0)
    shapes = itertools.pairwise(SIZES)
    return [(draw.standard_normal((rows + 1, columns)) / np.sqrt(rows)).astype(np.float32) for rows, columns in shapes]


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels


def batch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = digits()
    mine = np.random.default_rng(step).permutation(len(images))[:BATCH][rank::WORLD]
    return images[mine], labels[mine]


def with_ones(x: np.ndarray) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1), np.float32)])


def forward(weights: list[np.ndarray], x: np.ndarray, before_layer=lambda layer: None) -> tuple[list[np.ndarray], np.ndarray]:
    """The input of each layer, and the probabilities."""
    inputs = []
    for layer in range(LAYERS):
        before_layer(layer)
        inputs.append(with_ones(x))
        x = inputs[-1] @ weights[layer]
        if layer < LAYERS - 1:
            x = np.maximum(x, 0)
    exps = np.exp(x - x.max(1, keepdims=True))
    return inputs, exps / exps.sum(1, keepdims=True)


def backward(weights, inputs, probabilities, labels, ready) -> float:
    """Calls `ready(layer, gradient)` from the last layer to the first; returns the loss."""
    rows = np.arange(len(labels))
    loss = float(-np.log(probabilities[rows, labels]).mean())
    error = probabilities.copy()
    error[rows, labels] -= 1
    error /= len(labels)
    for layer in reversed(range(LAYERS)):
        ready(layer, inputs[layer].T @ error)
        if layer:
            error = (error @ weights[layer][:-1].T) * (inputs[layer][:, :-1] > 0)
    return loss


def the_plan(weights: list[np.ndarray]) -> Plan:
    """ByteScheduler's slices, for times in proportion to sizes. Every rank must make the same."""
    ready_ns, tensors = 0, []
    for layer in reversed(range(LAYERS)):
        ready_ns += weights[layer].size
        tensors.append(TensorProfile(TensorSpec(f"layer{layer}", weights[layer].nbytes), ready_ns, layer))
    layers = tuple(Layer(f"layer{layer}", weights[layer].size) for layer in range(LAYERS))
    profile = Profile("mlp", "numpy", tuple(tensors), layers, ready_ns)
    policy = policies.get("bytescheduler", partition_bytes=16 << 10, credit_bytes=64 << 10)
    return make_plan(policy, profile, Place(Network.line(WORLD, 20_000, 10**9), "server"))


def meet(rank: int, parent: Connection, plan: Plan) -> Node:
    """A worker and a server in each process, all connected; ranks with different plans are refused."""
    fingerprint = hashlib.sha256(plan.fingerprint.encode()).digest()
    node = Node(NodeOptions(world=WORLD, servers=WORLD, rank=rank, server=rank, fingerprint=fingerprint))
    parent.send(node.port)
    for other, port in enumerate(parent.recv()):
        if other != rank:
            node.dial(other, "127.0.0.1", port)
    node.join(30)
    return node


def worker(rank: int, parent: Connection) -> None:
    weights = parameters()
    plan = the_plan(weights)
    sums = [np.zeros_like(weights[LAYERS - 1 - tensor]) for tensor in range(LAYERS)]  # in the plan's order: last layer first
    summation = NodeSums(meet(rank, parent, plan), sums)
    core = Core(plan, summation)

    def update(layer: int) -> None:
        tensor = LAYERS - 1 - layer
        core.wait(tensor)
        weights[layer] -= RATE / WORLD * sums[tensor]

    def ready(layer: int, gradient: np.ndarray) -> None:
        tensor = LAYERS - 1 - layer
        sums[tensor][:] = gradient
        core.notify_ready(tensor)

    losses = []
    for step in range(STEPS):
        x, labels = batch(step, rank)
        inputs, probabilities = forward(weights, x, update if step else lambda layer: None)
        core.begin()
        losses.append(backward(weights, inputs, probabilities, labels, ready))
    for layer in range(LAYERS):
        update(layer)
    summation.close()
    parent.send((losses, weights))


def alone() -> list[np.ndarray]:
    """The same training in one process, which does every rank's part one after another."""
    weights = parameters()
    for step in range(STEPS):
        totals = [np.zeros_like(weight) for weight in weights]
        for rank in range(WORLD):
            x, labels = batch(step, rank)
            inputs, probabilities = forward(weights, x)

            def add(layer: int, gradient: np.ndarray, totals=totals) -> None:
                totals[layer] += gradient

            backward(weights, inputs, probabilities, labels, add)
        for weight, total in zip(weights, totals, strict=True):
            weight -= RATE / WORLD * total
    return weights


def train_in_processes(worker: Callable[[int, Connection], None]) -> list[list[np.ndarray]]:
    """Run `worker` as every rank, let them meet, and print the losses; returns the weights of each."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(WORLD):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=worker, args=(rank, theirs), daemon=True))
        processes[-1].start()
        theirs.close()  # so that the end of a process is noticed here
        pipes.append(ours)
    ports = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(ports)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    for step in range(0, STEPS, 20):
        print(f"step {step}: loss {np.mean([losses[step] for losses, _ in results]):.3f}")
    return [weights for _, weights in results]


def main() -> None:
    trained = train_in_processes(worker)
    expected = alone()
    same = all(np.array_equal(one, other) for weights in trained for one, other in zip(weights, expected, strict=True))
    print("weights equal to those of one process, bit for bit" if same else "weights differ")


if __name__ == "__main__":
    main()
