"""Memory: what a replica under DDP keeps on its device, and what would fit where it does not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradlane.core.profile import Profile
from gradlane.units import format_bytes

ADAM_STATES, MOMENTUM_STATES = 2, 1  # of a parameter's size and dtype each, as torch.optim keeps them


@dataclass(frozen=True)
class Replica:
    """What one device keeps while it trains a whole copy of the model, in bytes.

    Not counted: buckets of DDP beside the gradients (`gradient_as_bucket_view` makes them one), and what the
    framework and fragmentation take.

    Attributes:
        parameters: of all parameters that have gradients.
        gradients: as many, in the parameters' dtype.
        activations: the most that the backward pass needs of the forward pass; None where nobody counted it.
        batch: samples that `activations` is of.
        device: the device's name.
        capacity: the device's memory.
    """

    parameters: int
    gradients: int
    activations: int | None
    batch: int | None
    device: str
    capacity: int

    @staticmethod
    def of(profile: Profile, device: str, capacity: int, activations: int | None = None, batch: int | None = None) -> Replica:
        """The memory of a profile's model.

        Args:
            profile: before its gradients are made smaller for the wire.
            device, capacity, activations, batch: as the attributes.
        """
        return Replica(profile.size_bytes, profile.size_bytes, activations, batch, device, capacity)

    @property
    def states(self) -> int:
        """Adam's: two values a parameter, the most that the usual optimizers keep."""
        return ADAM_STATES * self.parameters

    @property
    def lasting(self) -> int:
        """Parameters, gradients and the states of Adam."""
        return self.parameters + self.gradients + self.states

    @property
    def total(self) -> int:
        return self.lasting + (self.activations or 0)

    @property
    def fits(self) -> bool | None:
        """Whether all of it fits the device, by a bound from above for activations; None where these are not known and the
        rest fits.
        """
        if self.activations is None and self.lasting <= self.capacity:
            return None
        return self.total <= self.capacity

    def describe(self) -> str:
        """One line for people: the parts, and the device's memory."""
        activations = ", activations not known"
        if self.activations is not None:
            activations = f", activations up to {format_bytes(self.activations)}"
        return (
            f"parameters {format_bytes(self.parameters)}, gradients {format_bytes(self.gradients)}, Adam's states "
            f"{format_bytes(self.states)}{activations}: {format_bytes(self.total)} of {self.device}'s "
            f"{format_bytes(self.capacity)}"
        )

    def remedy(self) -> str:
        """Where it does not fit: what would, in one line."""
        assert self.fits is False
        if self.lasting > self.capacity:
            how, ways = self._less_state()
            return f"a replica does not fit; {how}this would: {'; or '.join(ways)}"
        return f"a replica may not fit; this would: {'; or '.join(self._less_activation())}"

    def _less_state(self) -> tuple[str, list[str]]:
        room, how = self.capacity - (self.activations or 0), ""
        if room <= 0:
            assert self.activations is not None
            assert self.batch is not None
            room, how = self.capacity - self.activations // self.batch, "with a batch of 1, "
        if room <= 0:
            room, how = self.capacity, "with activations recomputed, "
        ways = []
        if self.lasting - (ADAM_STATES - MOMENTUM_STATES) * self.parameters <= room:
            ways.append("momentum SGD instead of Adam")
        if self.lasting // 2 <= room:
            ways.append("parameters, gradients and states in bfloat16")
        ways.append(
            f"sharding all three over {math.ceil(self.lasting / room)} or more devices (FSDP, which gradlane does not plan)"
        )
        return how, ways

    def _less_activation(self) -> list[str]:
        assert self.activations is not None
        assert self.batch is not None
        smaller = (self.capacity - self.lasting) * self.batch // self.activations
        ways = [f"a batch of {smaller} or less"] if smaller else []
        return [*ways, "recomputing activations in the backward pass"]
