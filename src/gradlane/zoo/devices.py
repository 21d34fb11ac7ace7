"""Devices: how long a module takes, from its operations, its bytes and the device's data sheet.

    time = factor * sum over kernels of max(operations / peak, bytes / bandwidth) + launch

Operations and bytes bound any kernel (the roofline model); small kernels cost their launch. The
operations are those that are carried out, which Winograd's algorithm makes fewer than those
counted. No device reaches its data sheet: `factor` is the ratio between a measured total and the model's. For a
network without a measured total on a device, it is the geometric mean of the factors known for that
device or, without any, for all devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradlane.zoo.layers import Module

ELEMENT_BYTES = 4
UPDATE_PASSES = 5  # momentum SGD reads gradient, momentum and parameter and writes the last two
LAUNCH_NS = 8_000  # a CUDA kernel's launch and gap, a few microseconds on every device here


@dataclass(frozen=True)
class DeviceSpec:
    """Peak operations and bytes per second for 32-bit elements, from the maker's data sheet."""

    title: str
    operations_per_second: float
    bytes_per_second: float


DEVICES = {
    "k40": DeviceSpec("Tesla K40c", 4.29e12, 288e9),
    "k80": DeviceSpec("Tesla K80, one GK210 of two", 2.80e12, 240e9),
    "m60": DeviceSpec("Tesla M60, one GM204 of two", 4.82e12, 160e9),
    "gtx-1080ti": DeviceSpec("GeForce GTX 1080 Ti", 11.34e12, 484e9),
    "v100": DeviceSpec("Tesla V100 PCIe", 14.0e12, 900e9),
    "rtx-3090": DeviceSpec("GeForce RTX 3090", 35.6e12, 936e9),
    "a100": DeviceSpec("A100 SXM 80 GB, TF32 products", 156e12, 2039e9),
    "h100": DeviceSpec("H100 SXM, TF32 products", 495e12, 3350e9),
    "h200": DeviceSpec("H200 SXM, TF32 products", 495e12, 4800e9),
}


@dataclass(frozen=True)
class Total:
    """The measured forward and backward time of one iteration, with its paper and the place in it."""

    seconds: float
    batch: int
    paper: str
    place: str

    @property
    def source(self) -> str:
        return f"{self.paper} {self.place}"


_COMPANION = "Fig. 9, computation of FP32 in the authors' published script"
TOTALS: dict[tuple[str, str], Total] = {
    ("vgg16", "gtx-1080ti"): Total(0.580, 32, "Mercury", "§II-A: 0.580 s"),
    ("vgg19", "k40"): Total(8 * 64 * 0.946 / 279.2, 64, "Geryon", "Tables II and IV: 279.2 images/s on 8 at 94.6 %"),
    ("googlenet", "k80"): Total(
        2 * 64 / 163.36, 64, "MG-WFBP", "Fig. 6, authors' published script: 163.36 images/s on one node of two"
    ),
    ("resnet50", "k80"): Total(
        2 * 32 / 76.85, 32, "MG-WFBP", "Fig. 7, authors' published script: 76.85 images/s on one node of two"
    ),
    ("resnet50", "m60"): Total(
        64 / 71.5, 64, "Prophet", "Table 2 at 10 Gbit/s, where policies are level: 70.6 to 72.8 images/s"
    ),
    ("resnet18", "m60"): Total(64 / 220, 64, "Prophet", "§5.3 at 10 Gbit/s, where policies are level: 220 images/s"),
    ("resnet152", "v100"): Total(0.883118, 128, "MG-WFBP", _COMPANION),
    ("inception-v4", "v100"): Total(0.610822, 128, "MG-WFBP", _COMPANION),
    ("densenet161", "v100"): Total(0.477655, 64, "MG-WFBP", _COMPANION),
    ("densenet201", "v100"): Total(0.360877, 64, "MG-WFBP", _COMPANION),
}


def forward_seconds(module: Module, batch: int, device: DeviceSpec) -> float:
    """The data sheet's time of one module's forward pass, uncalibrated."""
    parameters_moved = module.parameters  # by the first kernel
    seconds = 0.0
    for kernel in module.kernels:
        moved = (kernel.moved_elements * batch + parameters_moved) * ELEMENT_BYTES
        carried_out = kernel.operations * batch / kernel.reduction
        seconds += max(carried_out / device.operations_per_second, moved / device.bytes_per_second) + LAUNCH_NS / 1e9
        parameters_moved = 0
    return seconds


def update_seconds(module: Module, device: DeviceSpec) -> float:
    """The time of one module's update by SGD with momentum: its bytes, and a launch for each tensor.

    Not calibrated: for ResNet-50 on a V100 it is what a recording of PyTorch's own has
    (`tests/unit/test_zoo_recordings.py`).
    """
    moved = UPDATE_PASSES * ELEMENT_BYTES * module.parameters
    return moved / device.bytes_per_second + len(module.tensors) * LAUNCH_NS / 1e9


def backward_seconds(module: Module, batch: int, device: DeviceSpec, is_first: bool) -> float:
    """The data sheet's time of one module's backward pass, uncalibrated.

    The gradients of input and of parameters each take as many operations as the forward pass. The
    first module's input needs no gradient.
    """
    forward = forward_seconds(module, batch, device)
    return forward if is_first else 2 * forward


def total_seconds(modules: list[Module], batch: int, device: DeviceSpec) -> float:
    """Forward and backward passes of all modules, uncalibrated."""
    return sum(
        forward_seconds(module, batch, device) + backward_seconds(module, batch, device, not index)
        for index, module in enumerate(modules)
    )


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
