"""The data plane from Python: nodes that send, sum and return gradients. Imports the native module, never torch."""

from gradlane.transport.node import ALL, DEALT, DTYPES, OPS, Lane, Node, NodeOptions
from gradlane.transport.rules import UNBOUNDED, Adam, Part, Rule, Sgd

__all__ = ["ALL", "DEALT", "DTYPES", "OPS", "UNBOUNDED", "Adam", "Lane", "Node", "NodeOptions", "Part", "Rule", "Sgd"]
