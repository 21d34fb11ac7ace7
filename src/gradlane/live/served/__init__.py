"""Training with the update on the servers: gradients go out, parameters come back; in step, within a bound, or as they come."""

from gradlane.live.served.attachment import attach_to_servers
from gradlane.live.served.session import ServedSession

__all__ = ["ServedSession", "attach_to_servers"]
