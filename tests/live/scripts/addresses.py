"""A rank on an emulated host whose own name leads to loopback: `addresses.py CASE BACKEND`.

CASE: "own name" (rank 0's MASTER_ADDR is 127.0.1.1, as Debian's /etc/hosts has it), "bridge" (the same, and each host has one
more interface with the same address, as Docker's bridge), "named" (the first, and all name their interface), "six" (no host
has an IPv4 address). Each rank prints what it summed, and rank 0 where its control channel listens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.core.network import Network


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main(case: str, backend: Any) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    if case == "bridge":
        ip("link", "add", "adocker0", "type", "bridge")
        ip("addr", "add", "172.17.0.1/16", "dev", "adocker0")
        ip("link", "set", "adocker0", "up")
    if case == "six":
        for name in ("lo", "eth0"):
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("0")
        ip("-6", "addr", "add", f"fd77::{rank + 1}/64", "dev", "eth0", "nodad")
        ip("-4", "addr", "flush", "dev", "eth0")
        os.environ["MASTER_ADDR"] = "::1" if rank == 0 else "fd77::1"
    elif rank == 0:
        os.environ["MASTER_ADDR"] = "127.0.1.1"
    dist.init_process_group("gloo")
    if case not in ("named", "six"):  # Gloo needs it for its next groups where a host's name leads to an IPv4 address
        del os.environ["GLOO_SOCKET_IFNAME"]  # which gradlane would follow
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session: Any = gradlane.attach(
        model, optimizer, gradlane.policies.get("wfbp"), network=Network.line(2, 20_000, 10**9), backend=backend, timeout=30
    )
    listeners = sorted(session._driver.coordination.channel._listeners)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 64) * (rank + 1)).sum().backward()
        optimizer.step()
    session.flush()
    said = f"{rank} listens {','.join(listeners)} has {model.weight.grad[0, 0].item():.1f}"
    session.close()
    print(said, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
