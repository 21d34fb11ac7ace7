"""`make bench`: what scheduling costs. Prints medians, spreads and ratios; A and B take turns in one run.

Parts, each in processes of its own, on loopback unless it says otherwise:
  overhead   two ranks train one network, in turns under torch DDP and under gradlane's default, for several
             lengths of a step
  c10d       two ranks call all_reduce, and train under DDP, in turns over Gloo and over gradlane's transport,
             through shared memory and over loopback; also four ranks on emulated hosts at 1 Gbit/s, 4 KB and 100 MB
  messages   two ranks send messages to one another, in turns over Gloo and over gradlane's transport
  goodput    a worker and a server beside iperf3, on loopback and on emulated hosts; where iperf3 is installed
  startup    what handing over a message costs, in microseconds
  parts      one rank, no network: the hook of a tensor, a message, a deferred update, in microseconds
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys


def main() -> int:
    print(f"# {platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; python -m bench")
    for module, ranks in (("bench.parts", 1), ("bench.overhead", 2), ("bench.c10d", 2), ("bench.messages", 2)):
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *rendezvous, "-m", module]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            return done.returncode
    lab = [sys.executable, "-m", "gradlane", "lab", "--quiet", "--hosts", "4", "--link", "1gbit", "--"]
    c10d = [*lab, sys.executable, "-m", "bench.c10d", "4096", "100000000"]
    for command in ([sys.executable, "-m", "bench.startup"], c10d, [sys.executable, "-m", "bench.goodput"]):
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
