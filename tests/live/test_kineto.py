"""Traces that this torch's profiler makes can be imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from gradlane import trace
from gradlane.core.profile import TensorSpec
from gradlane.errors import FormatError


def record(path: Path, dtype: torch.dtype = torch.float32, *, record_shapes: bool = True, passes: int = 1) -> nn.Module:
    """Three steps of a small model, as a trace."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16 * 12 * 12, 10)).to(
        dtype
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.zeros(4, 3, 16, 16, dtype=dtype)
    steps = schedule(wait=1, warmup=1, active=3)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=record_shapes, schedule=steps) as profiler:
        for _ in range(5):
            for _ in range(passes):
                model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return model


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_a_recorded_model_has_its_gradients_and_its_layers(tmp_path, dtype, name):
    model = record(tmp_path / "trace.json.gz", dtype)
    imported = trace.read(tmp_path / "trace.json.gz")
    sizes = sorted(parameter.numel() * dtype.itemsize for parameter in model.parameters())
    assert sorted(spec.size_bytes for spec in imported.specs) == sizes
    assert {spec.dtype for spec in imported.specs} == {name}
    # weight and bias of the classifier first, those of the first convolution last
    assert [tensor.layer for tensor in imported.tensors] == [2, 2, 1, 1, 0, 0]
    assert [layer.name for layer in imported.layers] == ["0.aten::conv2d", "1.aten::conv2d", "2.aten::linear"]
    assert all(layer.forward_ns > 0 and layer.update_ns > 0 for layer in imported.layers)
    assert "3 steps" in imported.source


def test_without_shapes_a_profile_of_the_model_names_and_sizes_the_gradients(tmp_path):
    record(tmp_path / "shaped.json")
    record(tmp_path / "bare.json", record_shapes=False)
    specs = [
        TensorSpec(f"model.{index}", spec.size_bytes) for index, spec in enumerate(trace.read(tmp_path / "shaped.json").specs)
    ]
    assert list(trace.read(tmp_path / "bare.json", tensors=specs).specs) == specs


def test_steps_with_several_backward_passes_are_refused(tmp_path):
    record(tmp_path / "trace.json", passes=2)
    with pytest.raises(FormatError, match="runs between gradients, so that there are several backward passes"):
        trace.read(tmp_path / "trace.json")


@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_of_checkpoints_are_no_parameters(tmp_path, reentrant):
    first, block, last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 3)
    params = [*first.parameters(), *block.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, schedule=schedule(wait=1, warmup=1, active=3)
    ) as profiler:
        for _ in range(5):
            last(checkpoint(block, first(torch.zeros(5, 8)), use_reentrant=reentrant)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    imported = trace.read(tmp_path / "trace.json")
    assert sorted(spec.size_bytes for spec in imported.specs) == sorted(param.nbytes for param in params)
    assert ("1 inputs of checkpoints are left out" in imported.source) == reentrant
