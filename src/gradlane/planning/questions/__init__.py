"""Questions to the simulator: sweeps over profiles, networks, cluster sizes and policies, and
what-ifs.

Pure functions from inputs to records; commands and experiments print and draw them.
"""

from gradlane.planning.questions.sweep import Case, Outcome, Refusal, judge, judge_plan, sweep
from gradlane.planning.questions.whatif import knob_grid, needed_rates

__all__ = ["Case", "Outcome", "Refusal", "judge", "judge_plan", "knob_grid", "needed_rates", "sweep"]
