"""Training loops as data: generated, run beside DDP, and made small where they differ: `python -m tests.live.programs`."""
