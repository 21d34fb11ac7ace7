"""gradlane on GPUs beside torch DDP: `python -m bench.device --help`."""
