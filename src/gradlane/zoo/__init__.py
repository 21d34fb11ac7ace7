"""Profiles of well-known networks, to plan with before anything has been measured.

Tensors are exact in number and size; names are the reference definition's (MobileNet's are close to
timm's), in order of use. Times are counted operations on a model of a device, calibrated to a
measured total if a paper states one; each profile's `source` says which. `gradlane profile` and
`gradlane convert` make profiles from measurements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gradlane.core.fields import MAX_NS, did_you_mean, need, need_int
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import InputError
from gradlane.units import format_ns
from gradlane.zoo import inception, language, vision
from gradlane.zoo.buses import BUSES as BUSES
from gradlane.zoo.buses import bus as bus
from gradlane.zoo.described import descriptions
from gradlane.zoo.devices import (
    COMPUTE_DTYPES,
    ELEMENT_BYTES,
    TOTALS,
    backward_seconds,
    device_spec,
    forward_seconds,
    geometric_mean,
    total_seconds,
    update_seconds,
)
from gradlane.zoo.devices import DEVICES as DEVICES
from gradlane.zoo.devices import PRODUCTS as PRODUCTS
from gradlane.zoo.layers import Module, Net
from gradlane.zoo.links import LINKS as LINKS

MAX_BATCH = 1_000_000


@dataclass(frozen=True)
class Entry:
    """A model and the defaults of its profile.

    Attributes:
        tensors, parameters: how many.
        operations: of one sample's forward pass.
        batch, device: the defaults.
        paper: whose measured total the default profile is scaled to; None: no paper states one.
        source: the default profile's `source`.
    """

    name: str
    title: str
    tensors: int
    parameters: int
    operations: int
    batch: int
    device: str
    paper: str | None
    source: str


@dataclass(frozen=True)
class _Model:
    title: str
    build: Callable[[], Net]
    batch: int
    device: str


_VGG16, _VGG19 = (2, 2, 3, 3, 3), (2, 2, 4, 4, 4)
_MODELS = {
    "alexnet": _Model("AlexNet, 224 x 224", vision.alexnet, 512, "k40"),
    "vgg16": _Model("VGG-16, 224 x 224", lambda: vision.vgg(_VGG16), 32, "gtx-1080ti"),
    "vgg16-cifar10": _Model(
        "VGG-16, 32 x 32, 10 classes", lambda: vision.vgg(_VGG16, 32, 10, average=False), 128, "gtx-1080ti"
    ),
    "vgg19": _Model("VGG-19, 224 x 224", lambda: vision.vgg(_VGG19), 64, "k40"),
    "resnet18": _Model("ResNet-18, 224 x 224", lambda: vision.resnet((2, 2, 2, 2), False), 64, "m60"),
    "resnet50": _Model("ResNet-50, 224 x 224", lambda: vision.resnet((3, 4, 6, 3), True), 32, "k80"),
    "resnet152": _Model("ResNet-152, 224 x 224", lambda: vision.resnet((3, 8, 36, 3), True), 128, "v100"),
    "googlenet": _Model("GoogLeNet with auxiliary heads, 224 x 224", inception.googlenet, 64, "k80"),
    "inception-v3": _Model("Inception-v3 with auxiliary head, 299 x 299", inception.inception_v3, 32, "m60"),
    "inception-v4": _Model("Inception-v4, 224 x 224", inception.inception_v4, 128, "v100"),
    "densenet161": _Model("DenseNet-161, 224 x 224", lambda: vision.densenet((6, 12, 36, 24), 48, 96), 64, "v100"),
    "densenet201": _Model("DenseNet-201, 224 x 224", lambda: vision.densenet((6, 12, 48, 32), 32, 64), 64, "v100"),
    "mobilenet": _Model("MobileNet, 224 x 224", vision.mobilenet, 32, "gtx-1080ti"),
    "yolo": _Model("YOLO, first version, 448 x 448", vision.yolo, 64, "k40"),
    "yolov2": _Model("YOLOv2, 416 x 416", vision.yolov2, 64, "k40"),
    "bert-base": _Model("BERT-Base, 128 positions", lambda: language.bert(768, 12), 32, "rtx-3090"),
    "bert-large": _Model("BERT-Large, 512 positions", lambda: language.bert(1024, 24, 512), 8, "a100"),
    "transformer-base": _Model("base Transformer, 32 + 32 positions", language.transformer_base, 16, "v100"),
    "gpt2": _Model("GPT-2 124M, 1024 positions", language.gpt2, 8, "a100"),
    "vit-b16": _Model("ViT-B/16, 224 x 224", lambda: vision.vit(768, 12), 64, "a100"),
    "vit-l16": _Model("ViT-L/16, 224 x 224", lambda: vision.vit(1024, 24), 64, "a100"),
    "llama-1b": _Model("Llama of 1.24 G parameters, 2048 positions", language.llama_1b, 4, "h100"),
} | {name: _Model(each.title, each.build, each.batch, each.device) for name, each in descriptions().items()}


def names() -> tuple[str, ...]:
    return tuple(_MODELS)


def devices() -> tuple[str, ...]:
    return tuple(DEVICES)


def describe(name: str) -> Entry:
    """The model of a name, and the defaults of its profile.

    Raises:
        InputError: there is no such model; the message lists those that exist.
    """
    model, modules = _model(name), _modules(name)
    total = TOTALS.get((name, model.device))
    return Entry(
        name,
        model.title,
        sum(len(module.tensors) for module in modules),
        sum(module.parameters for module in modules),
        sum(module.operations for module in modules),
        model.batch,
        model.device,
        None if total is None else total.paper,
        _source(name, model.device, model.batch, DEVICES[model.device].default_dtype),
    )


def profile(
    name: str,
    *,
    device: str | None = None,
    batch: int | None = None,
    compute_dtype: str | None = None,
    mfu: float | None = None,
) -> Profile:
    """One iteration of a network.

    Gradients become ready in reverse order of definition, a module's all at once when its backward
    pass ends. Updates are those of SGD with momentum, at the device's memory bandwidth, and a kernel
    for each tensor.

    Args:
        name: a model, see `names`.
        device: a device, see `devices`; None: the one that a paper used (`describe`).
        batch: samples for each worker; None: as the paper.
        compute_dtype: of products and activations, a key of `COMPUTE_DTYPES`: what a script runs under autocast.
            Parameters, gradients and updates stay float32. None: the device's default for float32.
        mfu: the part of the device's peak at which it computes, more than 0 and at most 1. It is the counted operations of the
            passes, divided by the time of a step without communication and by the peak. None: as calibrated.

    Raises:
        InputError: there is no such model or device, or an argument is out of its range.
    """
    model, modules = _model(name), _modules(name)
    device = model.device if device is None else device
    hardware = device_spec(device)
    batch = model.batch if batch is None else batch
    need_int("batch", batch, 1, MAX_BATCH)
    dtype = compute_dtype or hardware.default_dtype
    peak = hardware.peak(dtype)
    factor, _ = _calibration(name, device, dtype)
    tensors: list[TensorProfile] = []
    now = 0.0
    for index in range(len(modules) - 1, -1, -1):
        module = modules[index]
        now += factor * backward_seconds(module, batch, hardware, index == 0, dtype)
        tensors += [
            TensorProfile(TensorSpec(tensor, math.prod(shape) * ELEMENT_BYTES), round(now * 1e9), index)
            for tensor, shape in reversed(module.tensors)
        ]
    layers = tuple(
        Layer(
            module.name,
            round(factor * forward_seconds(module, batch, hardware, dtype) * 1e9),
            round(update_seconds(module, hardware) * 1e9),
        )
        for module in modules
    )
    counted = Profile(name, device, tuple(tensors), layers, round(now * 1e9), _source(name, device, batch, dtype))
    if mfu is None:
        return counted
    need(0 < mfu <= 1, "mfu", mfu, "a part of the device's peak, more than 0 and at most 1")
    step_ns = training_operations(name, batch) / (mfu * peak) * 1e9
    need(step_ns <= MAX_NS, "mfu", mfu, f"a part at which a step takes at most {format_ns(MAX_NS)}")
    source = f"{_counted(device, batch, dtype)}, at {100 * mfu:g}% of {peak / 1e12:g} TFLOP/s"
    return msgspec.structs.replace(counted.stretched(step_ns / counted.compute_ns), source=source)


def training_operations(name: str, batch: int) -> int:
    """Counted operations of a step's passes: three times those of a forward pass, as a backward pass has two."""
    return 3 * batch * sum(module.operations for module in _modules(name))


def activation_bytes(name: str, batch: int, compute_dtype: str) -> int:
    """The most that the backward pass keeps of the forward pass: what every kernel writes, each once.

    Attention writes no scores, as fused kernels do not. Recomputing activations and operations in place keep less.

    Args:
        name: a model, see `names`.
        batch: samples of a step.
        compute_dtype: of activations, a key of `COMPUTE_DTYPES`.
    """
    elements = sum(kernel.written_elements for module in _modules(name) for kernel in module.kernels)
    return elements * batch * COMPUTE_DTYPES[compute_dtype]


def _model(name: str) -> _Model:
    if name not in _MODELS:
        raise InputError(f"model: got {name!r}{did_you_mean(name, _MODELS)}, expected one of {', '.join(_MODELS)}")
    return _MODELS[name]


@functools.cache
def _modules(name: str) -> list[Module]:
    return _model(name).build().modules


@functools.cache
def _factors() -> dict[tuple[str, str], float]:
    return {
        (name, device): total.seconds / total_seconds(_modules(name), total.batch, DEVICES[device])
        for (name, device), total in TOTALS.items()
    }


def _source(name: str, device: str, batch: int, dtype: str) -> str:
    return f"{_counted(device, batch, dtype)}, {_calibration(name, device, dtype)[1]}"


def _counted(device: str, batch: int, dtype: str) -> str:
    products = "" if dtype == "float32" else f", {PRODUCTS[dtype]} products"
    return f"gradlane zoo: operations counted, {DEVICES[device].title}{products}, batch {batch}"


def _calibration(name: str, device: str, dtype: str) -> tuple[float, str]:
    """The factor from data sheet times to measured times, and where it comes from."""
    factors = _factors()
    chip = DEVICES[device].same_chip or device
    is_default = dtype == DEVICES[device].default_dtype  # the totals were measured with it
    if (name, chip) in factors and is_default:
        factor = factors[name, chip]
        measured = f"calibrated to {TOTALS[name, chip].source}"
        return factor, measured if chip == device else f"not measured: {chip}'s factor of {factor:.2f}"
    here = [factor for (_, where), factor in factors.items() if where == chip]
    if here:
        return geometric_mean(here), f"not measured: {chip}'s mean factor of {geometric_mean(here):.2f}"
    mean = geometric_mean(list(factors.values()))
    return mean, f"not measured: the mean factor of all devices, {mean:.2f}"
