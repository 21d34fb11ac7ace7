"""The scheduling core."""

from gradlane.dispatch.dispatcher import Dispatcher

__all__ = ["Dispatcher"]
