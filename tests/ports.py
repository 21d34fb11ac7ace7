"""Ports for processes that a test starts by number, as launchers do."""

import random
import socket

# The kernel gives connections ports from 32768 on; one of those, once closed here, may be another test's before it is opened.
_PORTS = range(10_000, 30_000)


def free_port() -> int:
    """A port of loopback that nobody listens on, and that no connection is given by chance."""
    # the system's numbers, since every test process seeds the others alike
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free")
