"""What each step takes and waits for, as CSV and to the monitoring that is named.

gradlane launch --nproc 2 examples/metrics.py
gradlane launch --nproc 2 examples/metrics.py --to prometheus --steps 100000
gradlane launch --nproc 2 examples/metrics.py --to tensorboard --to wandb
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import gradlane

Export = Callable[[gradlane.StepMetrics], object]
"""Called after each step."""


def numbers(metrics: gradlane.StepMetrics) -> dict[str, float]:
    """What can be drawn: not the names, and not what is not known yet."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}


def to_prometheus(port: int = 9400) -> Export:
    """Serve the numbers of each rank on a port of its own, `port` and the rank, for Prometheus to collect."""
    from prometheus_client import Gauge, Histogram, start_http_server

    start_http_server(port + dist.get_rank())
    gauges: dict[str, Gauge] = {}
    waits = Histogram("gradlane_wait_seconds", "waiting for sums in a step", buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3))

    def export(metrics: gradlane.StepMetrics) -> None:
        for name, value in numbers(metrics).items():
            if name not in gauges:
                gauges[name] = Gauge(f"gradlane_{name}", f"{name} of session.metrics()")
            gauges[name].set(value)
        if metrics["exposed_seconds"] is not None:
            waits.observe(metrics["exposed_seconds"])

    return export


def to_opentelemetry() -> Export:
    """Record the numbers as gauges of the meter provider that the script has set, with the rank as an attribute."""
    from opentelemetry import metrics as opentelemetry

    meter, attributes = opentelemetry.get_meter("gradlane"), {"rank": dist.get_rank()}

    def export(metrics: gradlane.StepMetrics) -> None:
        for name, value in numbers(metrics).items():
            meter.create_gauge(f"gradlane.{name}").set(value, attributes)

    return export


def to_tensorboard() -> Export:
    """Write a scalar for each number of rank 0 to the folder `runs`."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("runs")

    def export(metrics: gradlane.StepMetrics) -> None:
        for name, value in numbers(metrics).items():
            writer.add_scalar(f"gradlane/{name}", value, metrics["step"])
        writer.flush()

    return export


def to_wandb() -> Export:
    """Log the numbers of rank 0 to Weights & Biases."""
    import wandb

    run = wandb.init(project="gradlane")
    return lambda metrics: run.log({f"gradlane/{name}": value for name, value in numbers(metrics).items()})


def to_mlflow() -> Export:
    """Log the numbers of rank 0 to MLflow."""
    import mlflow

    mlflow.start_run()
    return lambda metrics: mlflow.log_metrics(numbers(metrics), step=metrics["step"])


EXPORTS = {
    "prometheus": to_prometheus, "opentelemetry": to_opentelemetry, "tensorboard": to_tensorboard, "wandb": to_wandb,
    "mlflow": to_mlflow,
}  # fmt: skip
FROM_EACH_RANK = ("prometheus", "opentelemetry")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", choices=EXPORTS, action="append", default=[])
    parser.add_argument("--drop-in", action="store_true", help="wrap the model instead of attaching to it")
    parser.add_argument("--steps", type=int, default=20, help="how many steps to train (default: 20)")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model: nn.Module = net
    if options.drop_in:
        model = gradlane.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session = None if options.drop_in else gradlane.attach(net, optimizer)
    exports = [EXPORTS[name]() for name in options.to if name in FROM_EACH_RANK or dist.get_rank() == 0]
    table = csv.writer(sys.stdout)

    for step in range(options.steps):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        if isinstance(model, gradlane.DistributedDataParallel):
            session = model.session  # None in the first step, which torch sums
        if session is None:
            continue
        metrics = session.metrics()
        for export in exports:
            export(metrics)
        if step >= options.steps - 5 and dist.get_rank() == 0:
            table.writerow([step, metrics["policy"], metrics["messages"], metrics["step_seconds"], metrics["exposed_seconds"]])

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
