"""Sessions on a device: what `make test-device` runs. `python -m tests.device --help`."""
