"""The scheduling core."""

from gradlane.dispatch.dispatcher import Dispatcher
from gradlane.dispatch.log import Fact, Log, LoggedDispatcher, replay

__all__ = ["Dispatcher", "Fact", "Log", "LoggedDispatcher", "replay"]
