"""`gradlane server`: a server of a running job, in a process of its own, on any host."""

from __future__ import annotations

import os
import signal

import click

from gradlane.cli.inputs.types import SECONDS, SIZE
from gradlane.errors import InputError, UnsupportedError


@click.command()
@click.argument("store", metavar="HOST:PORT")
@click.option("--listen", metavar="ADDRESS", help="Address of this host to listen on. Default: the one that leads to HOST.")
@click.option(
    "--memory", type=SIZE, metavar="SIZE", help="Refuse a job that may need more memory here. Default: this host's memory."
)
@click.option(
    "--wait",
    type=SECONDS,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up if no job is at HOST:PORT by then.",
)
@click.option("--quiet", is_flag=True, help="Say nothing but errors, and if this server was not needed.")
@click.pass_context
def command(ctx: click.Context, store: str, listen: str | None, memory: int | None, wait: float, quiet: bool) -> None:
    """Sum gradients for the job whose rank 0 meets the others at HOST:PORT (its --rdzv-endpoint, or MASTER_ADDR and
    MASTER_PORT), until it is over.

    Start as many as the job is told of: its ranks run with `gradlane launch --await-servers N --backend server` or
    `gradlane.attach(..., backend="server", servers=N)`. A server computes nothing but sums; it needs one core, and about
    the memory of what is under way. One that was killed is started again by the same command, and serves the job's next
    attempt.

    \b
    host 3$ gradlane server node0:29400
    host 0$ gradlane launch --nnodes 3 --rdzv-endpoint node0:29400 --backend server --await-servers 1 train.py
    """
    # the process waits inside torch, where a signal handler in Python could not run; beside ranks, the launcher ends it
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    host, colon, port = store.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"HOST:PORT: got {store!r}, expected HOST:PORT of the job's store, as in node0:29400")
    # our error says more about a missing store than torch's log lines
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from gradlane.live.backends.external_servers import serve
    except ImportError as error:
        raise UnsupportedError(
            f"server needs torch, which cannot be imported ({error}); install it with: pip install 'gradlane[torch]'"
        ) from error

    def warn(text: str) -> None:
        click.echo(f"gradlane: {text}", err=True)

    ctx.exit(
        0 if serve(store, (lambda text: None) if quiet else warn, warn, address=listen, max_bytes=memory, wait_s=wait) else 1
    )
