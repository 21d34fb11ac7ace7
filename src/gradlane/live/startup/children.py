"""Children: processes that a rank of `gradlane launch` starts, and that are the ranks of a job of their own.

Some scripts start their ranks themselves: with `torch.multiprocessing.spawn` and a `tcp://` address, or with variables that
the children set. One process of the launcher is enough for them, and its children take part in its place. Several would each
start all ranks of the script, which would wait for one another for ever.

A process that `multiprocessing` starts afresh runs the script before anything else, and the script may take torch's
DistributedDataParallel by its name. So such a process is told to run this module, which prepares what `boot` prepares and
then runs the script.
"""

from __future__ import annotations

import mmap
import multiprocessing.spawn
import os
import runpy
from collections.abc import Mapping
from typing import Any

import msgspec
import torch.distributed as dist

import gradlane
from gradlane.core.launch_options import LaunchOptions
from gradlane.errors import InputError
from gradlane.live.startup import rendezvous
from gradlane.live.startup.launched import set_launched

_VARIABLE = "GRADLANE_RANK"  # the environment variable by which a process knows the rank that it comes from
_HAS_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_prepares = multiprocessing.spawn.get_preparation_data
_took_part = mmap.mmap(-1, 1)  # shared with forked children


class _Rank(msgspec.Struct, frozen=True):
    """A rank that the launcher has started: its process, the variables of torchrun, and the script that it runs."""

    pid: int
    rank: str
    node: str
    address: str
    restart: str
    script: str


def prepare(options: LaunchOptions) -> None:
    """Have this process, which is about to run a script, obey the options of the launcher."""
    set_launched(options)
    dist.init_process_group = init_process_group  # type: ignore[assignment]
    if options.ddp:
        gradlane.replace_ddp()


def prepare_children(script: str) -> None:
    """Have the processes that this rank starts take part; it is about to run `script`."""
    rank, node, restart = (os.environ.get(name, "0") for name in ("RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"))
    launched = _Rank(os.getpid(), rank, node, _address(), restart, script)
    os.environ[_VARIABLE] = msgspec.json.encode(launched).decode()
    multiprocessing.spawn.get_preparation_data = _prepare_child


def took_part() -> bool:
    """Whether a child of this rank has joined a job."""
    return _took_part[0] != 0


def init_process_group(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
    """As `rendezvous.init_process_group`, also in a child of a rank, which may have another address.

    Raises:
        InputError: another rank of the launcher has started the same rank of the script's own job.
    """
    rank = _launched_rank(os.environ)
    if rank is not None and os.getpid() != rank.pid:
        _took_part[0] = 1
        _join(rank, init_method, options)
    rendezvous.init_process_group(backend, init_method, **options)


def _prepare_child(name: str) -> dict[str, Any]:
    """What a process that is started afresh is told: to run this module where it would run the script."""
    told: dict[str, Any] = _prepares(name)
    rank = _launched_rank(os.environ)
    if rank is not None and told.get("init_main_from_path") == os.path.normpath(rank.script):
        del told["init_main_from_path"]
        told["init_main_from_name"] = __name__
        _took_part[0] = 1
    return told


def _launched_rank(environment: Mapping[str, str]) -> _Rank | None:
    text = environment.get(_VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=_Rank)


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _join(launched: _Rank, init_method: str | None, options: Mapping[str, Any]) -> None:
    """Prepare to join the job at the address that the script gives, if it is not the launcher's."""
    by_variables = init_method in (None, "env://")
    address = _address() if by_variables else str(init_method)
    if "store" in options or (by_variables and address == launched.address):
        return
    has_agent = os.environ.pop(_HAS_AGENT, None) == "True"  # else torch expects the launcher's store at the script's address
    number = options.get("rank", os.environ.get("RANK"))
    if not has_agent or number is None:
        return
    host, _, port = launched.address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]
    key = f"gradlane/children/{launched.restart}/{launched.node}/{address}/{number}"
    first = store.compare_set(key, "", launched.rank).decode()
    if first != launched.rank:
        both = " and ".join(sorted((first, launched.rank), key=int))
        raise InputError(
            f"init_process_group: got rank {number} of a job at {address} from ranks {both} of gradlane launch, expected it "
            "from one: this script starts its ranks itself. Start it with gradlane launch --nproc 1, or leave out the option "
            "of the script by which it starts them"
        )


def run_script() -> dict[str, Any]:
    """Run the script of the rank that this process comes from, as `multiprocessing` does; returns its globals."""
    rank = _launched_rank(os.environ)
    assert rank is not None
    prepare(LaunchOptions.from_environment(os.environ))
    return runpy.run_path(rank.script, run_name="__mp_main__")


if __name__ == "__mp_main__":
    from gradlane.live.startup import children  # the names of this module become the script's

    globals().update(children.run_script())
