"""A callback for `keras.Model.fit` that averages gradients over ranks: Keras 3 on PyTorch, TensorFlow or JAX."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradlane.core.timeline import Timeline
from gradlane.errors import InputError, JobError, UnsupportedError
from gradlane.plugin.installed import needs

with needs("keras", __name__, "gradlane[keras]"):
    import keras


class AverageGradients(keras.callbacks.Callback):
    """Averages the gradients of each step of `fit` over all ranks; each trains on its own part of the data.

        model.fit(x[rank::world], y[rank::world], callbacks=[AverageGradients()])

    When training begins, the model's weights become rank 0's. When it ends, those that are not trained (the moving averages of
    a BatchNormalization) become rank 0's again, so that all weights are equal. Seeds of dropout stay each rank's own. All ranks
    must take equally many steps.

    Args:
        options: on PyTorch, keywords of `gradlane.attach`, for which torch.distributed must be initialized; in a process that
            was started alone nothing is done. On TensorFlow and JAX, keywords of `gradlane.plugin.averaging.Averaging`.

    Raises from `fit`:
        InputError: `fit` was given two of these, or the model is not compiled.
        UnsupportedError: Keras runs on another backend, or on TensorFlow with `jit_compile=True`.
        GradlaneError: as `attach` or `Averaging`, and what ended the job.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._running: _OnPyTorch | _InCompiledStep | None = None
        self._timeline: Timeline | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        backend = keras.backend.backend()
        if backend not in ("torch", "tensorflow", "jax"):
            raise UnsupportedError(f"Keras runs on {backend!r}, expected KERAS_BACKEND=torch, tensorflow or jax")
        if getattr(self.model, "optimizer", None) is None:
            raise InputError("model: it has no optimizer, expected one that is compiled: model.compile(optimizer, loss)")
        self._running = (_OnPyTorch if backend == "torch" else _InCompiledStep)(self.model, self._options)

    def on_train_end(self, logs: Any = None) -> None:
        """Keras calls it."""
        if self._running is not None:
            self._timeline = self._running.end(self.model)
            self._running = None

    def timeline(self) -> Timeline:
        """What happened when in the last iterations; while `fit` runs or after it. Raises `JobError` before."""
        if self._running is not None:
            return self._running.timeline()
        if self._timeline is None:
            raise JobError("there is no timeline before the first fit, and none in a process that trains alone")
        return self._timeline


class _OnPyTorch:
    """A Keras model is a torch.nn.Module: a session takes its gradients, and Keras updates with what it reads in `.grad`."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        import gradlane

        trained = {id(weight) for weight in model.weights}
        own = [(variable, _value(variable)) for variable in model.variables if id(variable) not in trained]
        self._session = gradlane.attach(model, None, **options)
        for variable, value in own:
            variable.assign(value)

    def timeline(self) -> Timeline:
        return self._session.timeline()

    def end(self, model: Any) -> Timeline | None:
        from gradlane.live import IdleSession
        from gradlane.live.backends.copies import copy_from

        if isinstance(self._session, IdleSession):
            return None
        timeline = self._session.timeline()
        self._session.close()
        copy_from(0, [weight.value for weight in model.non_trainable_weights])
        return timeline


class _InCompiledStep:
    """TensorFlow or JAX compile the step: the optimizer's `apply` averages first, until training has ended."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        backend = keras.backend.backend()
        if "apply" in vars(model.optimizer):
            raise InputError(
                "callbacks: this optimizer's gradients are averaged already, expected one AverageGradients; after a fit that "
                "ended with an error, compile the model with another optimizer"
            )
        if backend == "tensorflow" and model.jit_compile:
            raise UnsupportedError(
                "XLA compiles the step, which hides gradients; expected model.compile(..., jit_compile=False)"
            )
        self._average = importlib.import_module(f"gradlane.plugin.{backend}").GradientAverage(
            [variable.value for variable in model.trainable_variables], **options
        )
        self._take_from_rank_0(model.weights)
        self._apply = model.optimizer.apply
        model.optimizer.apply = self._averaged
        model.make_train_function(force=True)  # one compiled before would not average
        model.train_function = self._typed(model.train_function)

    def _averaged(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        return self._apply(self._average(list(grads)), trainable_variables)

    def _typed(self, train: Callable[[Any], Any]) -> Callable[..., Any]:
        def train_function(*args: Any) -> Any:
            try:
                return train(*args)
            except Exception as error:
                if self._average.failure is not None:
                    raise self._average.failure from error
                raise

        return train_function

    def _take_from_rank_0(self, weights: Sequence[Any]) -> None:
        for weight, value in zip(weights, self._average.broadcast([_value(weight) for weight in weights]), strict=True):
            weight.assign(value)

    def timeline(self) -> Timeline:
        timeline: Timeline = self._average.timeline()
        return timeline

    def end(self, model: Any) -> Timeline:
        self._take_from_rank_0(model.non_trainable_weights)
        timeline = self.timeline()
        self._average.close()
        del model.optimizer.apply
        model.train_function = None
        return timeline


def _value(variable: Any) -> np.ndarray[Any, Any]:
    return np.asarray(keras.ops.convert_to_numpy(variable))
