"""The scheduling core: when messages start (`dispatcher`), and in which order a connection sends
packets (`wire_order`).
"""

from gradlane.schedule.dispatcher import Dispatcher
from gradlane.schedule.log import Fact, Log, LoggedDispatcher, replay

__all__ = ["Dispatcher", "Fact", "Log", "LoggedDispatcher", "replay"]
