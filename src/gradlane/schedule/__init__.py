"""Scheduling: the Dispatcher, which decides what starts next, as specified and in native code; the
engine that drives it; a log of what it decided.
"""

from gradlane.core.records.dispatch_log import Fact, Log
from gradlane.schedule.dispatcher import Dispatcher
from gradlane.schedule.engine import Engine, Owner
from gradlane.schedule.log import LoggedDispatcher, replay
from gradlane.schedule.native import NativeDispatcher

__all__ = ["Dispatcher", "Engine", "Fact", "Log", "LoggedDispatcher", "NativeDispatcher", "Owner", "replay"]
