"""`gradlane launch`: torchrun, with gradlane's options, for any training script.

The options reach the ranks in one environment variable. In each rank `gradlane.live.startup.boot`
reads them and then runs the script. This process itself trains nothing, and it imports torch only
when it launches something.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
from click.shell_completion import CompletionItem

from gradlane import policies
from gradlane.cli import reports
from gradlane.cli.inputs import completion
from gradlane.cli.inputs.faults import naming, of_argparse
from gradlane.cli.inputs.knobs import parse_knobs, read_policy
from gradlane.cli.inputs.types import COUNT, SECONDS, SIZE, Checked, make_folder, remove_files, told, whole_number, writable
from gradlane.compare.memory import need_memory
from gradlane.compare.processes import kept_running
from gradlane.core import files
from gradlane.core.backends import ALGORITHMS, BackendName, refuse_owners_beyond, refuse_what_cannot_be_done
from gradlane.core.launch_options import LAUNCH_VARIABLE, STALL_TIMEOUT_S, LaunchOptions, need_stall_timeout
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import tunable
from gradlane.core.records.search_log import AUTO
from gradlane.core.records.tuned import Tuned
from gradlane.core.wire_dtype import WIRE_DTYPES
from gradlane.errors import GradlaneError, InputError, JobError, UnsupportedError
from gradlane.lifetime import ending_at_once, scratch_folder
from gradlane.planning import catalog
from gradlane.report.page.launched import files_of_job, left_something, of_launch, sessions_in

_USAGE = "gradlane launch [OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]..."
_ABOUT = (
    "Start SCRIPT as torchrun would, with gradlane's options. They win over what the script gives to attach(); "
    "a script that never calls attach() runs as it is, but for --ddp."
)
_MORE = """\
torchrun options:
  Every option of torchrun but -m, --no-python and --run-path may stand before SCRIPT and is handed to it as it is:
  --nnodes, --node-rank, --rdzv-endpoint, --master-addr, --log-dir, ... (torchrun --help)

examples:
  gradlane launch --nproc 2 --ddp train.py --epochs 3
  gradlane launch --nproc 2 train.py --epochs 3
  gradlane launch --nproc 2 --policy bytescheduler --knob partition_bytes=1MiB train.py
  gradlane launch --nproc 2 --policy bytescheduler --tune --knobs tuned.json train.py
  gradlane launch --nproc 2 --backend server --policy mercury train.py
  gradlane launch --nproc 2 --backend server --servers 1 train.py
  gradlane launch --nnodes 4 --rdzv-endpoint node0:29400 --plan plan.json --timeline out train.py
"""


# torchrun's defaults: for an --rdzv-endpoint without a port, and for --master-port
_DEFAULT_PORT, _MASTER_PORT = 29400, 29500


class _Once(argparse.Action):
    """An option whose second value would silently take the place of the first."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            raise argparse.ArgumentError(self, f"got {before} and {values}, expected one")
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """torchrun's parser with gradlane's options. --help shows only gradlane's, and a mistake raises
    `InputError`.
    """

    def format_help(self) -> str:
        return help_text()

    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            message = "got no SCRIPT, expected one after the options"
        message = of_argparse(message, self._option_string_actions)
        before = "" if message.startswith("-") else "launch: "
        raise InputError(f"{before}{message}; see gradlane launch --help")


class _Command(click.Command):
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete an option; all options are argparse's."""
        given = ctx.params.get("arguments") or ()
        return [] if any(word.endswith(".py") for word in given) else completion.beginning_with(incomplete, _actions())


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the value of the option before it, or SCRIPT or one of its arguments."""
    option = (ctx.params.get("arguments") or ("",))[-1]
    if option == "--policy":
        return completion.trained_policies(ctx, param, incomplete)
    action = _actions().get(option)
    return completion.beginning_with(incomplete, action.choices) if action and action.choices else completion.files(incomplete)


def _actions() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    _add_options(parser)
    return parser._option_string_actions


# click passes all arguments on, since only torchrun's parser knows which options have values
@click.command(
    cls=_Command, add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete)
@click.pass_context
def command(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """torchrun, with gradlane's options; takes any training script."""
    if not arguments or arguments[0] in ("-h", "--help"):
        click.echo(help_text())
        ctx.exit(0 if arguments else 2)
    ctx.exit(launch(arguments))


def help_text() -> str:
    """The text that --help prints. Does not import torch."""
    parser = argparse.ArgumentParser(usage=_USAGE, description=_ABOUT, add_help=False, formatter_class=_formatter)
    _add_options(parser)
    return f"{parser.format_help()}\n{_MORE}"


def launch(arguments: Sequence[str]) -> int:
    """Do what `gradlane launch ARGUMENTS` does.

    Args:
        arguments: the command line after `launch`.

    Returns:
        The exit code.

    Raises:
        InputError: an option is not usable; nothing was started.
        RunError: a rank failed; it has the exit code.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
        UnsupportedError: torch cannot be imported.
    """
    try:
        with ending_at_once():
            from gradlane.live.startup import torchrun
    except ImportError as error:
        raise UnsupportedError(
            f"launch needs torch, which cannot be imported ({error}); install it with: pip install 'gradlane[torch]'"
        ) from error
    parser = _Parser(
        usage=_USAGE, parents=[torchrun.arguments()], add_help=False, conflict_handler="resolve", allow_abbrev=False
    )
    _add_options(parser)
    given = parser.parse_args(list(arguments))
    if given.module or given.no_python or given.run_path:
        raise InputError("launch: got -m, --no-python or --run-path, expected a SCRIPT; for others call torchrun itself")
    _existing("SCRIPT", given.training_script)
    _check_processes(given)
    if _becomes_rank(given):
        _refuse_for_a_rank(given)
    options = _options(given)
    _check_carrier(options, _most_ranks(given))
    _check_host(given)
    named = (options.plan, options.network, options.knobs, given.training_script)
    if given.timeline is not None:
        make_folder("--timeline", Path(given.timeline))
        # no rank leaves a file before all have met, which no node that runs this has done; but one may join an elastic job late
        if not _may_grow(given):
            remove_files("--timeline", files_of_job(Path(given.timeline)), named)
    if given.report is not None:  # this job may write none
        remove_files("--report", [given.report], named)
    run = _launch_and_report if given.report is not None else _start
    if not (options.of_sessions() or given.report is not None) or _becomes_rank(given):
        return run(given, options, torchrun.run)
    with scratch_folder() as attached:
        exit_code = run(given, msgspec.structs.replace(options, attached=attached), torchrun.run)
        if exit_code or any(Path(attached).iterdir()) or not options.of_sessions():
            return exit_code
    click.echo(f"gradlane: {options.without_effect()}", err=True)
    return int(options.verify)  # who asks for a check is not told that all is well


def _launch_and_report(given: argparse.Namespace, options: LaunchOptions, run: Any) -> int:
    """Launch, and write the report of what the ranks of this node left."""
    with scratch_folder() as scratch:
        folder = options.timeline or scratch
        try:
            exit_code = _start(given, msgspec.structs.replace(options, timeline=folder), run)
        except (JobError, KeyboardInterrupt):
            _report(given.report, Path(folder), has_failed=True)
            raise
        _report(given.report, Path(folder), has_failed=exit_code != 0)
    return exit_code


def _report(target: Path, folder: Path, has_failed: bool) -> None:
    """Write a report of `folder`. If that is not possible, print the reason.

    Raises:
        GradlaneError, OSError: the files cannot be read or written, and the job has not failed.
    """
    why_not = "no rank of this node attached gradlane and ended its session"
    if left_something(folder):
        try:
            reports.write(target, "gradlane launch", [of_launch(each) for each in sessions_in(folder)])
        except (GradlaneError, OSError) as error:  # of a rank that was ended there may be a part of its files
            if not has_failed:
                raise
            why_not = str(error)
        else:
            click.echo(f"{target} is a report that opens in a browser")
            return
    click.echo(f"gradlane: no report was written: {why_not}", err=True)


def _start(given: argparse.Namespace, options: LaunchOptions, run: Any) -> int:
    """Start the ranks and wait for them; where this process is to be a rank itself, become it."""
    from gradlane.live.backends.addresses import INTERFACE_VARIABLE

    os.environ[LAUNCH_VARIABLE] = options.to_text()
    if given.interface is not None:
        os.environ[INTERFACE_VARIABLE] = given.interface
    given.training_script_args = [given.training_script, *given.training_script_args]
    given.module, given.training_script = True, "gradlane.live.startup.boot"
    if _becomes_rank(given):
        from gradlane.live.startup import slurm

        if slurm.is_rank(os.environ):
            os.environ.update(slurm.rank_variables(os.environ))
        os.execv(sys.executable, [sys.executable, "-m", given.training_script, *given.training_script_args])
    server = [sys.executable, "-m", "gradlane", "server", options.servers_store or ""]
    with kept_running([server] * (given.servers or 0), int(given.max_restarts)):
        return int(run(given))


def _becomes_rank(given: argparse.Namespace) -> bool:
    """Whether another launcher, or srun, has started this process as one of several ranks, and it is to be one itself.

    Started by torchrun here, its job would have this one rank: each would train alone, without a word.
    """
    from gradlane.live.startup import slurm

    is_rank = {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() and os.environ.get("WORLD_SIZE", "1") != "1"
    return (is_rank or slurm.is_rank(os.environ)) and _names_no_ranks(given)


def _refuse_for_a_rank(given: argparse.Namespace) -> None:
    """Refuse what only a process can do that starts the ranks itself. The options for ranks are made after this: servers of
    their own would name a rendezvous, and this process would look like one that starts ranks.
    """
    if given.report is not None:
        raise InputError(
            "launch: got --report in a rank of another launcher, expected --timeline DIR, and gradlane report DIR later"
        )
    if given.servers is not None or given.await_servers is not None:
        raise InputError(
            "launch: got servers of their own in a rank of another launcher, expected none: they meet at torchrun's "
            "rendezvous, so start one process a host, with --nnodes, --nproc and --rdzv-endpoint (gradlane lab has --servers)"
        )


def _names_no_ranks(given: argparse.Namespace) -> bool:
    """Whether no option says which ranks torchrun is to start, and how they meet."""
    return (str(given.nnodes), str(given.nproc_per_node)) in (("1:1", "1"), ("1", "1")) and not (
        given.standalone or given.rdzv_endpoint or given.master_port
    )


def _servers_store(given: argparse.Namespace) -> str:
    """HOST:PORT of the rendezvous, where servers and ranks meet. If torchrun would choose the port
    itself, one is chosen here and put into its options.
    """
    names_none = given.rdzv_backend == "static" and not given.rdzv_endpoint and given.master_port is None
    is_alone = str(given.nnodes).rpartition(":")[2] == "1"
    if given.standalone or (names_none and is_alone) or str(given.rdzv_endpoint).endswith(":0"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            given.rdzv_endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        given.standalone, given.rdzv_backend = False, "c10d"
    endpoint = given.rdzv_endpoint or f"{given.master_addr}:{given.master_port or _MASTER_PORT}"
    return endpoint if ":" in endpoint else f"{endpoint}:{_DEFAULT_PORT}"


def _check_processes(given: argparse.Namespace) -> None:
    """Refuse numbers of processes and nodes that torchrun would fail on when it starts, or that memory cannot hold."""
    for option, text, words, form in (
        ("--nproc", given.nproc_per_node, ("auto", "cpu", "gpu", "xpu"), r"[1-9][0-9]*"),
        ("--nnodes", given.nnodes, (), r"[1-9][0-9]*(:[1-9][0-9]*)?"),
    ):
        if text not in words and not re.fullmatch(form, text):
            expected = "MIN:MAX" if not words else ", ".join(words)
            raise InputError(f"{option}: got {text!r}, expected a number, 1 or more, or {expected}")
    ranks = int(given.nproc_per_node) if given.nproc_per_node.isdigit() else 1
    need_memory("--nproc", ranks + (given.servers or 0))


def _may_grow(given: argparse.Namespace) -> bool:
    """Whether nodes may join a job that runs already."""
    least, _, most = given.nnodes.rpartition(":")
    return bool(least) and int(least) != int(most)


def _most_ranks(given: argparse.Namespace) -> int | None:
    """How many ranks the job may have at most; None if that is not known here."""
    if _becomes_rank(given) or not given.nproc_per_node.isdigit():
        return None
    return int(given.nproc_per_node) * int(given.nnodes.rpartition(":")[2])


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=26, width=100)


def _type(checked: Checked) -> Callable[[str], Any]:
    """A type of the commands' options as argparse takes it, which keeps the text of one kind of error only."""

    def parse(text: str) -> Any:
        try:
            return checked.parse(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options")
    group.add_argument("--nproc", metavar="N", dest="nproc_per_node", default=argparse.SUPPRESS,
                       help="processes on this node; torchrun's --nproc-per-node (default: 1)")  # fmt: skip
    group.add_argument(
        "--policy",
        action=_Once,
        metavar="NAME[:KNOB=VALUE]",
        help="plan with this policy (gradlane policies lists them), or auto: find the best while training",
    )
    group.add_argument("--knob", metavar="NAME=VALUE", action="append", default=[],
                       help="a knob of the policy, as in partition_bytes=4MiB; may be repeated")  # fmt: skip
    group.add_argument("--plan", metavar="FILE", help="run this plan (gradlane plan --out), whatever the policy")
    group.add_argument(
        "--backend",
        choices=["all-reduce", "server"],
        help="what carries messages: torch.distributed, or gradlane's transport (default: auto chooses, others take "
        "all-reduce)",
    )
    group.add_argument(
        "--algorithm",
        choices=ALGORITHMS,
        help="of all-reduce: over all ranks at once, or within each host first (default: the faster one, measured)",
    )
    group.add_argument(
        "--packet-bytes", metavar="SIZE", type=_type(SIZE), help="size of a packet of backend server (default: 30KiB)"
    )
    group.add_argument("--weight", metavar="N", type=_type(whole_number(1, 8)),
                       help="connections where there would be one, 1 to 8: this job's share beside others")  # fmt: skip
    group.add_argument("--wire-dtype", choices=list(WIRE_DTYPES),
                       help="float32 gradients travel as bfloat16 or float16, in half of the bytes")  # fmt: skip
    group.add_argument("--summation-order", choices=["arrival", "rank"],
                       help="how backend server adds; rank: the same bits in every run (default: arrival)")  # fmt: skip
    group.add_argument("--servers", metavar="N", type=_type(COUNT),
                       help="start N servers in processes of their own on this node, rather than one in each rank")  # fmt: skip
    group.add_argument("--await-servers", metavar="N", type=_type(COUNT),
                       help="N servers come from other hosts (gradlane server); every node says so")  # fmt: skip
    group.add_argument("--tune", action="store_true",
                       help="try other values of the policy's knobs while training, and keep the best")  # fmt: skip
    group.add_argument("--knobs", metavar="FILE",
                       help="tuned knobs: used from this file, or with --tune left there (and begun from)")  # fmt: skip
    group.add_argument("--ddp", action="store_true",
                       help="put gradlane.DistributedDataParallel in the place of torch's: for scripts that know nothing of "
                       "gradlane")  # fmt: skip
    group.add_argument("--verify", action="store_true",
                       help="compare the first 20 steps, and each 100th, with what DDP would have done, and end where they "
                       "differ: what to do first with a new script")  # fmt: skip
    group.add_argument("--check-finite", action="store_true",
                       help="end the job before an update with a gradient that is infinite or NaN, and name its rank and "
                       "tensor")  # fmt: skip
    group.add_argument("--network", metavar="FILE", help="plan for this network rather than measuring one")
    group.add_argument("--timeline", metavar="DIR",
                       help="write each rank's plan, what it did and when, and the profile and the network (of servers: the "
                       "cluster) as they were measured, to this directory; a second session of a script (--ddp with two "
                       "models) to DIR/session-2")  # fmt: skip
    group.add_argument("--report", metavar="FILE", type=_type(Checked("file", lambda text: writable(Path(text)))),
                       help="write a report of the last steps of this node's ranks: one HTML file for a browser")  # fmt: skip
    group.add_argument("--progress", metavar="SECONDS", type=_type(SECONDS),
                       help="print a line this often: what steps take and wait for, and under which policy")  # fmt: skip
    group.add_argument("--interface", metavar="NAME",
                       help="the network interface at which other hosts reach this one (GRADLANE_INTERFACE)")  # fmt: skip
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_type(SECONDS),
        help="the longest that a rank waits for others (the process group's)",
    )
    group.add_argument("--stall-timeout", metavar="SECONDS", type=_type(SECONDS),
                       help=f"how long a rank may say nothing: stopped, or its host cut off (default: {STALL_TIMEOUT_S:g})",
                       )  # fmt: skip
    group.add_argument("-h", "--help", action="help", help="show this and exit")


def _options(given: argparse.Namespace) -> LaunchOptions:
    """The options for the ranks. They are checked here, before any rank is started."""
    named, knobs = _setting(given)
    backend: BackendName = given.backend or "all-reduce"
    if given.plan is not None and (given.policy is not None or knobs):
        raise InputError("launch: got --plan with --policy or --knob, expected one or the other; a plan needs no policy")
    if given.plan is not None and (given.tune or given.knobs is not None):
        raise InputError("launch: got --plan with --tune or --knobs, expected one or the other; a plan has no knobs")
    if named == AUTO and (knobs or given.tune or given.knobs is not None):
        raise InputError("launch: got --policy auto with --knob, --tune or --knobs, expected it alone")
    if named != AUTO and (named is not None or knobs or given.tune):
        policy = read_policy(policies.default(backend) if named is None else given.policy, parse_knobs(given.knob))
        if given.tune and not tunable(policy):
            raise InputError(
                f"--tune: got policy {policy.name}, which has no knobs to tune, expected another; try --policy bytescheduler"
            )
    servers = given.servers if given.servers is not None else given.await_servers
    if servers is not None:
        if given.servers is not None and given.await_servers is not None:
            raise InputError("launch: got --servers and --await-servers, expected one: servers of here, or of other hosts")
        if given.backend != "server":
            option = "--servers" if given.servers is not None else "--await-servers"
            raise InputError(f"{option}: got it without --backend server, expected both")
    if given.plan is not None:
        files.read(_existing("--plan", given.plan), Plan)
    if given.network is not None:
        files.read(_existing("--network", given.network), Network)
    if given.knobs is not None and given.tune:
        with naming("--knobs"):
            writable(Path(given.knobs))
    elif given.knobs is not None:
        files.read(_existing("--knobs", given.knobs), Tuned)
    if knobs and given.knobs is not None and Path(given.knobs).exists():
        raise InputError(f"--knob: got it with --knobs {given.knobs}, which has the policy's knobs; expected one or the other")
    if given.stall_timeout is not None:
        need_stall_timeout("--stall-timeout", given.stall_timeout)
    return LaunchOptions(
        policy=named,
        policy_knobs=knobs,
        plan=_absolute("--plan", given.plan),
        backend=given.backend,
        algorithm=given.algorithm,
        packet_bytes=given.packet_bytes,
        summation_order=given.summation_order,
        servers=servers,
        servers_store=None if servers is None else _servers_store(given),
        weight=given.weight,
        wire_dtype=given.wire_dtype,
        network=_absolute("--network", given.network),
        tune=given.tune,
        knobs=_absolute("--knobs", given.knobs),
        timeout=given.timeout,
        stall_timeout=given.stall_timeout,
        verify=given.verify,
        check_finite=given.check_finite,
        timeline=_absolute("--timeline", given.timeline),
        progress=given.progress,
        ddp=given.ddp,
    )


def _setting(given: argparse.Namespace) -> tuple[str | None, dict[str, Any]]:
    """The name of --policy, and the knobs that follow it with those of --knob."""
    knobs = parse_knobs(given.knob)
    if given.policy is None:
        return None, knobs
    with naming("--policy"):
        setting = catalog.parse(given.policy)
    return setting.name, {**setting.knobs, **knobs}


def _check_carrier(options: LaunchOptions, ranks: int | None) -> None:
    """Refuse what no script can make right. Without --backend, a script that attaches may still ask for servers."""
    from gradlane.live.startup.options import CarrierOptions

    backend, external = options.backend, options.servers is not None
    given = {"--packet-bytes": options.packet_bytes, "--summation-order": options.summation_order}
    for option, value in given.items():
        if value is not None and options.ddp and backend != "server":
            raise InputError(f"{option}: got {value} without --backend server, expected both")
    if options.algorithm is not None and backend == "server":
        raise InputError(f"--algorithm: got {options.algorithm} with --backend server, expected it with all-reduce")
    with naming("--packet-bytes"):
        CarrierOptions(backend or "server", options.packet_bytes, None, options.servers or 0)
    with naming("--summation-order"):
        CarrierOptions(backend or "server", None, options.summation_order, options.servers or 0)
    if options.plan is not None:
        plan = files.read(options.plan, Plan)
        if backend is not None:
            refuse_what_cannot_be_done(plan, backend, external)
        if ranks is not None:
            refuse_owners_beyond(plan, ranks)
    elif options.policy is not None and backend is not None:
        carried = (AUTO, *catalog.names(backend, external))
        if options.policy not in carried and not catalog.is_own(options.policy):
            beside = " with servers in processes of their own" if external else ""
            raise InputError(
                f"--policy: got {options.policy}, which {backend}{beside} cannot carry, expected another --backend, or "
                f"one of {', '.join(carried)}"
            )


def _check_host(given: argparse.Namespace) -> None:
    """Refuse what no rank of this host could use."""
    from gradlane.live.backends.addresses import INTERFACE_VARIABLE, named_address
    from gradlane.transport.host import is_wanted

    is_wanted()
    if given.interface is not None:
        with naming("--interface"):
            named_address({INTERFACE_VARIABLE: given.interface})


def _absolute(option: str, text: str | None) -> str | None:
    return None if text is None else told(option, Path(text).resolve())


def _existing(what: str, text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise InputError(f"{what}: got {text!r}, which is not a file; expected the path of one")
    return path
