"""Training with the update on the servers: gradients go out, parameters come back; in step, within a bound, or as they come."""

from gradlane.live.remote_update.attach import attach_to_servers
from gradlane.live.remote_update.session import ServedSession

__all__ = ["ServedSession", "attach_to_servers"]
