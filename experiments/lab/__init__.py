"""The papers' experiments on emulated hosts: real processes, sockets and TCP on shaped links."""
