"""Scheduling: the Dispatcher, which decides what starts next, the engine that drives it, and a log of what it decided."""

from gradlane.core.records.dispatch_log import Fact, Log
from gradlane.schedule.dispatcher import Dispatcher
from gradlane.schedule.engine import Engine, Owner
from gradlane.schedule.log import LoggedDispatcher, replay

__all__ = ["Dispatcher", "Engine", "Fact", "Log", "LoggedDispatcher", "Owner", "replay"]
