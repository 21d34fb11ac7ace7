"""Carries the messages of a session: torch.distributed's all-reduce, or gradlane's parameter
servers.
"""
