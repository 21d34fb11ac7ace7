"""What `gradlane launch` runs in each process: take its options from the environment, then run the script.

The options of the command line win over what the script passes to `attach`, so that one script can be tried
under many policies. A script that never calls `attach` runs as it is.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import msgspec
import torch.distributed as dist

from gradlane import policies
from gradlane.core import files
from gradlane.core.backends import BackendName
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.search_log import AUTO
from gradlane.errors import GradlaneError, InputError
from gradlane.live.session.verification import VerifyOptions
from gradlane.live.startup import overrides, rendezvous
from gradlane.planning import catalog
from gradlane.planning.tuning import TuneOptions


def options_from(environment: dict[str, str]) -> overrides.Overrides:
    """The options that `gradlane launch` put there. Raises `InputError`, and `FormatError` for a bad file."""
    knobs = msgspec.json.decode(environment.get("GRADLANE_KNOBS") or "{}", type=dict[str, int | float | str])
    name, plan = environment.get("GRADLANE_POLICY"), environment.get("GRADLANE_PLAN")
    backend: BackendName | None = environment.get("GRADLANE_BACKEND") or None  # type: ignore[assignment]  # attach judges it
    network, timeout = environment.get("GRADLANE_NETWORK"), environment.get("GRADLANE_TIMEOUT")
    packet_bytes, servers = environment.get("GRADLANE_PACKET_BYTES"), environment.get("GRADLANE_SERVERS")
    timeline, profile = environment.get("GRADLANE_TIMELINE"), environment.get("GRADLANE_PROFILE")
    policy: str | Policy | Plan | None = AUTO if name == AUTO else None
    if plan:
        policy = files.read(plan, Plan)
    elif policy is None and (name or knobs):
        policy = catalog.get(name or policies.default(backend or "all-reduce"), **knobs)
    knobs_file = environment.get("GRADLANE_KNOBS_FILE")
    if plan and (name or knobs):
        raise InputError("--plan and --policy were both given; a plan needs no policy")
    return overrides.Overrides(
        policy=policy,
        backend=backend,
        packet_bytes=int(packet_bytes) if packet_bytes else None,
        summation_order=environment.get("GRADLANE_SUMMATION_ORDER") or None,  # type: ignore[arg-type]
        servers=int(servers) if servers else None,
        servers_store=environment.get("GRADLANE_SERVERS_STORE") or None,
        network=files.read(network, Network) if network else None,
        timeout=float(timeout) if timeout else None,
        weight=int(environment["GRADLANE_WEIGHT"]) if environment.get("GRADLANE_WEIGHT") else None,
        timeline=Path(timeline) if timeline else None,
        profile=Path(profile) if profile else None,
        tune=TuneOptions() if environment.get("GRADLANE_TUNE") else None,
        knobs=Path(knobs_file) if knobs_file else None,
        verify=VerifyOptions() if environment.get("GRADLANE_VERIFY") else None,
    )


def main(arguments: list[str]) -> None:
    """Run the script `arguments[0]` with the rest as its arguments."""
    try:
        overrides.override(options_from(dict(os.environ)))
        script = arguments[0]
        if not Path(script).is_file():
            raise InputError(f"script: got {script!r}, expected a Python file")
    except GradlaneError as error:
        sys.exit(f"gradlane: {error}")
    dist.init_process_group = rendezvous.init_process_group  # type: ignore[assignment]
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
