"""One rank of a public script: `python witness.py FOLDER DEVICE SCRIPT [ARGS]...` runs it as a launcher does.

At the end FOLDER/RANK.json has what became of the training (`Witnessed`). Watching changes nothing: a hook after each
optimizer's step takes the time, and deferred updates are counted as they run. On a GPU, kernels that add in one order are asked
for, and NCCL is told of a host for each rank, since it refuses two ranks of one host on one GPU.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy


class Witnessed(msgspec.Struct, frozen=True):
    """What a rank saw.

    digest: of all parameters, of the tensors in optimizers' states and of wrapped models' buffers. Optimizers are in the order
    of their first steps. steps_ns: of the first optimizer. settled: the step after which no plan was tried.
    deferred: updates that ran after their step. updates: all that steps asked for.
    """

    digest: str
    steps_ns: list[int]
    settled: int
    deferred: int
    updates: int


class Witness:
    def __init__(self) -> None:
        self.optimizers: list[Any] = []
        self.marks: list[int] = []
        self.models: list[Any] = []
        self.settled = self.deferred = self.updates = 0

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            for each in gc.get_objects():
                if issubclass(type(each), DistributedDataParallel) and not any(each is model for model in self.models):
                    self.models.append(each)
        self.updates += sum(len(group["params"]) for group in optimizer.param_groups)
        if optimizer is self.optimizers[0]:
            self.marks.append(time.perf_counter_ns())
            sessions = [session for session in map(_session, self.models) if session is not None]
            if not sessions or any(session.tuning for session in sessions):
                self.settled = len(self.marks)

    def count(self) -> None:
        from gradlane.live.session.deferred_step import DeferredStep

        really = DeferredStep.update

        def update(step: DeferredStep, params: Any) -> None:
            params = list(params)
            self.deferred += len(params)
            really(step, params)

        patch.object(DeferredStep, "update", update).start()

    def seen(self) -> Witnessed:
        import torch

        found = hashlib.sha256()
        tensors = [each for optimizer in self.optimizers for group in optimizer.param_groups for each in group["params"]]
        for optimizer in self.optimizers:
            for state in optimizer.state_dict()["state"].values():
                tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
        tensors += [buffer for model in self.models for buffer in model.buffers()]
        for tensor in tensors:
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        steps = [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]
        return Witnessed(found.hexdigest(), steps, self.settled, self.deferred, self.updates)


def _session(model: Any) -> Any:
    return getattr(model, "session", None)


def main() -> None:
    folder, device, script = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if device == "cuda":
        os.environ.setdefault("NCCL_HOSTID", f"host-{os.environ['RANK']}")
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from gradlane.live.startup import boot

    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(1)  # some scripts begin with other values in each run
    if device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
    witness = Witness()
    register_optimizer_step_post_hook(witness.stepped)
    witness.count()
    try:
        boot.main(script)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    folder.joinpath(f"{os.environ['RANK']}.json").write_bytes(msgspec.json.encode(witness.seen()))


if __name__ == "__main__":
    main()
