"""Devices: how long a module takes, from its operations, its bytes and the device's data sheet.

    time = factor * sum over kernels of max(operations / peak, bytes / bandwidth) + launch

Operations and bytes bound any kernel (the roofline model); small kernels cost their launch. The
operations are those that are carried out, which Winograd's algorithm makes fewer than those
counted. No device reaches its data sheet: `factor` is the ratio between a measured total and the model's. For a
network without a measured total on a device, it is the geometric mean of the factors known for that
device or, without any, for all devices. A device of the same chip as another has the other's factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources

import msgspec

from gradlane.core.fields import did_you_mean, need
from gradlane.errors import InputError
from gradlane.zoo.layers import Module

ELEMENT_BYTES = 4  # of a parameter and its gradient; activations have the dtype that a module computes with
UPDATE_PASSES = 5  # momentum SGD reads gradient, momentum and parameter and writes the last two
LAUNCH_NS = 8_000  # a CUDA kernel's launch and gap, a few microseconds on every device here
COMPUTE_DTYPES = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}  # with the bytes of an activation
PRODUCTS = {"float32": "FP32", "tf32": "TF32", "bfloat16": "BF16", "float16": "FP16"}


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device as its maker's data sheet has it; a row of `data/devices.json`.

    Attributes:
        title: for people.
        memory_gib: memory that training may use, in GiB.
        bytes_per_second: of that memory.
        operations_per_second: peak of dense products, by a key of `COMPUTE_DTYPES`.
        default_dtype: what PyTorch's float32 products run as, a key of `operations_per_second`.
        source: who says so.
        has_nccl: whether NCCL, or the port of it that the maker has, sums there. TPUs have none.
        same_chip: the device of the same chip on which totals were measured; None: this one, if any.
    """

    title: str
    memory_gib: int
    bytes_per_second: float
    operations_per_second: dict[str, float]
    default_dtype: str
    source: str
    has_nccl: bool = True
    same_chip: str | None = None

    def __post_init__(self) -> None:
        for dtype in (*self.operations_per_second, self.default_dtype):
            need(dtype in COMPUTE_DTYPES, "operations_per_second", dtype, f"one of {', '.join(COMPUTE_DTYPES)}")
        need(self.default_dtype in self.operations_per_second, "default_dtype", self.default_dtype, "a dtype with a peak")

    @property
    def memory_bytes(self) -> int:
        return self.memory_gib * 2**30

    def peak(self, dtype: str) -> float:
        """Operations per second with products of a dtype.

        Raises:
            InputError: the data sheet has no such products.
        """
        if dtype not in self.operations_per_second:
            known = ", ".join(self.operations_per_second)
            raise InputError(f"compute dtype: got {dtype!r}, expected one that {self.title} has products of: {known}")
        return self.operations_per_second[dtype]


DEVICES = msgspec.json.decode(
    resources.files("gradlane.zoo").joinpath("data/devices.json").read_bytes(), type=dict[str, DeviceSpec]
)


def device_spec(name: str) -> DeviceSpec:
    """The device of a name.

    Raises:
        InputError: there is no such device; the message lists those that exist.
    """
    if name not in DEVICES:
        raise InputError(f"device: got {name!r}{did_you_mean(name, DEVICES)}, expected one of {', '.join(DEVICES)}")
    return DEVICES[name]


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


def forward_seconds(module: Module, batch: int, device: DeviceSpec, dtype: str | None = None) -> float:
    """The data sheet's time of one module's forward pass, uncalibrated.

    Args:
        module, device: what runs, and where.
        batch: samples.
        dtype: of products and of what is read and written, a key of `COMPUTE_DTYPES`; None: the device's default.
    """
    dtype = dtype or device.default_dtype
    peak, element_bytes = device.peak(dtype), COMPUTE_DTYPES[dtype]
    parameters_moved = module.parameters  # by the first kernel
    seconds = 0.0
    for kernel in module.kernels:
        moved = (kernel.moved_elements * batch + parameters_moved) * element_bytes
        carried_out = kernel.operations * batch / kernel.reduction
        seconds += max(carried_out / peak, moved / device.bytes_per_second) + LAUNCH_NS / 1e9
        parameters_moved = 0
    return seconds


def update_seconds(module: Module, device: DeviceSpec) -> float:
    """The time of one module's update by SGD with momentum: its bytes, and a launch for each tensor.

    Not calibrated: for ResNet-50 on a V100 it is what a recording of PyTorch's own has
    (`tests/unit/test_zoo_recordings.py`).
    """
    moved = UPDATE_PASSES * ELEMENT_BYTES * module.parameters
    return moved / device.bytes_per_second + len(module.tensors) * LAUNCH_NS / 1e9


def backward_seconds(module: Module, batch: int, device: DeviceSpec, is_first: bool, dtype: str | None = None) -> float:
    """The data sheet's time of one module's backward pass, uncalibrated.

    The gradients of input and of parameters each take as many operations as the forward pass. The
    first module's input needs no gradient.
    """
    forward = forward_seconds(module, batch, device, dtype)
    return forward if is_first else 2 * forward


def total_seconds(modules: list[Module], batch: int, device: DeviceSpec) -> float:
    """Forward and backward passes of all modules, uncalibrated."""
    return sum(
        forward_seconds(module, batch, device) + backward_seconds(module, batch, device, not index)
        for index, module in enumerate(modules)
    )


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
