"""The scheduling core."""

from gradlane.schedule.dispatcher import Dispatcher
from gradlane.schedule.log import Fact, Log, LoggedDispatcher, replay

__all__ = ["Dispatcher", "Fact", "Log", "LoggedDispatcher", "replay"]
