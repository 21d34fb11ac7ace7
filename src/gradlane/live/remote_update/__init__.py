"""Training with the optimizer's update on parameter servers: workers send gradients and receive
parameters.

Workers run in step, within a bound of iterations of one another, or with no bound.
"""

from gradlane.live.remote_update.attach import attach_to_servers
from gradlane.live.remote_update.session import ServedSession

__all__ = ["ServedSession", "attach_to_servers"]
