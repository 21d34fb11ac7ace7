"""Gradients of a JAX program averaged over ranks, inside of the compiled step.

XLA runs a callback as soon as the gradient that it is given has been computed, so that messages travel while the rest of the
backward pass is computed. The averages come back through one more callback, which is given what the others returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gradlane.core.profile import DTYPE_BYTES, TensorSpec
from gradlane.errors import InputError, UnsupportedError
from gradlane.plugin.averaging import Array, Averaging
from gradlane.plugin.installed import needs

with needs("jax", __name__, "gradlane[jax]"):
    import jax
    from jax.experimental import io_callback

# a callback that reads its arguments could wait for the thread that it runs on; obeyed if no array was made before the import
jax.config.update("jax_cpu_enable_async_dispatch", False)


class GradientAverage(Averaging):
    """Averages the gradients of `params` over all ranks; called in a step, compiled or not.

        with GradientAverage(params) as average:
            params = average.from_rank_0(params)

            @jax.jit
            def step(params, x, y):
                loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
                return update(params, average(gradients)), loss

    Call it once a step, with every gradient, on all ranks. A failure of the job ends the step with JAX's error; leaving the
    `with` block turns that into the job's own error.

    Args:
        params: a tree of arrays, each on one device.
        options: keywords of `Averaging`: policy, network, meeting, timeout_s.

    Raises:
        InputError: there are no arrays.
        UnsupportedError: an array is not of floats or is on several devices.
        GradlaneError: as `Averaging`.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(params)
        specs = [_spec(f"params{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves]
        if not specs:
            raise InputError("params: got a tree without arrays, expected the parameters")
        self._shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in leaves]
        super().__init__(specs, **options)

    def __call__(self, gradients: Any) -> Any:
        """The averages over all ranks of `gradients`, a tree like that of the parameters.

        Raises:
            InputError: it is another tree, or an array has another shape or dtype.
        """
        leaves, tree = jax.tree_util.tree_flatten(gradients)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        if tree != self._tree or shapes != self._shapes:
            raise InputError(f"gradients: got {tree} of {shapes}, expected those of params: {self._tree} of {self._shapes}")
        told = [io_callback(partial(self._tell, tensor), np.int32(0), leaf) for tensor, leaf in enumerate(leaves)]
        return jax.tree_util.tree_unflatten(tree, io_callback(self._averages, self._shapes, *told))

    def from_rank_0(self, tree: Any) -> Any:
        """Copies of rank 0's arrays in a tree (parameters, the optimizer's state), on every rank. Not in a compiled step."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        copies = self.broadcast([np.asarray(leaf) for leaf in leaves])
        return jax.tree_util.tree_unflatten(structure, [jax.numpy.asarray(copy) for copy in copies])

    def close(self, reason: str = "") -> None:
        """As `Averaging.close`, once the steps that were begun have ended."""
        if not reason:
            jax.effects_barrier()
        super().close(reason)

    def _tell(self, tensor: int, gradient: Any) -> np.int32:
        self.hand_over(tensor, np.asarray(gradient))
        return np.int32(0)

    def _averages(self, *_: Any) -> Sequence[Array]:
        return [each.view(like.dtype).reshape(like.shape) for each, like in zip(self.take(), self._shapes, strict=True)]


def _spec(name: str, leaf: Any) -> TensorSpec:
    if not isinstance(leaf, jax.Array) or leaf.dtype.name not in DTYPE_BYTES:
        got = f"an array of {leaf.dtype.name}" if isinstance(leaf, jax.Array) else f"a {type(leaf).__name__}"
        raise UnsupportedError(f"{name}: got {got}, expected a jax.Array of {', '.join(DTYPE_BYTES)}")
    if len(leaf.sharding.device_set) > 1:
        raise UnsupportedError(f"{name} is on {len(leaf.sharding.device_set)} devices, expected one device a process")
    return TensorSpec(name, leaf.nbytes, leaf.dtype.name)
