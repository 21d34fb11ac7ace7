"""The data plane from Python: nodes that send, sum and return gradients, and the beats of a control
channel. Imports the native module, never torch.
"""

from gradlane.transport.engine import CopiedRange, MessageMemory, NodeEngine
from gradlane.transport.heartbeat import Heartbeat
from gradlane.transport.node import ALL, ANYONE, DTYPES, FOR_EVER_S, OPS, SHARDED, Node, NodeOptions, Transfer, WireLane
from gradlane.transport.rules import UNBOUNDED, Adam, Part, Rule, Sgd

__all__ = [
    "ALL",
    "ANYONE",
    "DTYPES",
    "FOR_EVER_S",
    "OPS",
    "SHARDED",
    "UNBOUNDED",
    "Adam",
    "CopiedRange",
    "Heartbeat",
    "MessageMemory",
    "Node",
    "NodeEngine",
    "NodeOptions",
    "Part",
    "Rule",
    "Sgd",
    "Transfer",
    "WireLane",
]
