"""Gradients of a TensorFlow program averaged over ranks, inside of a `tf.function`.

Each gradient goes to a host function of its own as soon as it has been computed, so that messages travel while the rest of the
backward pass is computed. These functions are declared to be without state. TensorFlow would run functions with state in the
order of the program's text. It computes gradients in another order.
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

with needs("tensorflow", __name__, "gradlane[tensorflow]"):
    import tensorflow as tf


class GradientAverage(Averaging):
    """Averages the gradients of `variables` over all ranks; called in a step, compiled by `tf.function` or not.

        with GradientAverage(variables) as average:
            average.from_rank_0(variables)

            @tf.function
            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = loss_of(x, y)
                optimizer.apply(average(tape.gradient(loss, variables)), variables)
                return loss

    Call it once a step, with every gradient, on all ranks. A failure of the job ends the step with TensorFlow's error;
    leaving the `with` block turns that into the job's own error. XLA (`jit_compile=True`) cannot compile it.

    Args:
        variables: `tf.Variable`s, in the order in which the forward pass uses them.
        options: keywords of `Averaging`: policy, network, meeting, timeout_s.

    Raises:
        InputError: there are no variables.
        UnsupportedError: a variable is not of floats or its shape is not known.
        GradlaneError: as `Averaging`.
    """

    def __init__(self, variables: Sequence[Any], **options: Any) -> None:
        self._variables = list(variables)
        specs = [_spec(index, variable) for index, variable in enumerate(self._variables)]
        if not specs:
            raise InputError("variables: got none, expected those that are trained")
        super().__init__(specs, **options)

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """The averages over all ranks of the variables' gradients; those of embeddings become dense.

        Raises:
            InputError: there is another number of gradients than of variables.
            UnsupportedError: a variable has no gradient.
        """
        if len(gradients) != len(self._variables):
            raise InputError(f"gradients: got {len(gradients)}, expected one for each of {len(self._variables)} variables")
        for variable, gradient in zip(self._variables, gradients, strict=True):
            if gradient is None:
                raise UnsupportedError(f"{variable.name} has no gradient, expected one; leave out what the loss does not use")
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        told = [
            tf.numpy_function(partial(self._tell, tensor), [each], tf.int32, stateful=False)
            for tensor, each in enumerate(dense)
        ]
        averages = tf.numpy_function(self._averages, told, [each.dtype for each in dense])
        return [tf.ensure_shape(each, like.shape) for each, like in zip(averages, self._variables, strict=True)]

    def from_rank_0(self, variables: Sequence[Any]) -> None:
        """Set variables (trained or not, the optimizer's too) to their values on rank 0. Not in a `tf.function`."""
        for variable, value in zip(variables, self.broadcast([variable.numpy() for variable in variables]), strict=True):
            variable.assign(value)

    def _tell(self, tensor: int, gradient: Array) -> np.int32:
        self.hand_over(tensor, gradient)
        return np.int32(0)

    def _averages(self, *_: Any) -> list[Array]:
        taken = zip(self.take(), self._variables, strict=True)
        # TensorFlow may keep the memory that it is given, and the next iteration writes into this one
        return [each.view(like.dtype.as_numpy_dtype).reshape(like.shape).copy() for each, like in taken]


def _spec(index: int, variable: Any) -> TensorSpec:
    name = f"variables[{index}] ({variable.name})"
    if variable.dtype.name not in DTYPE_BYTES or not variable.shape.is_fully_defined():
        raise UnsupportedError(
            f"{name}: got {variable.dtype.name} of shape {variable.shape}, expected a known shape and one of "
            f"{', '.join(DTYPE_BYTES)}"
        )
    size = variable.shape.num_elements() * DTYPE_BYTES[variable.dtype.name]
    return TensorSpec(name, size, variable.dtype.name)
