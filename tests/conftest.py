"""Properties are tried on the same examples in every run, so that a change and not the day decides whether it passes.

`HYPOTHESIS_PROFILE=default python -m pytest tests/unit` looks for new ones.
"""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
