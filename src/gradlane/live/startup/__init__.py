"""Starts and ends sessions: options, validation, handshake between ranks, `attach`, `gradlane
launch`.
"""
