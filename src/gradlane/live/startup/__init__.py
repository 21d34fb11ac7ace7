"""How a session begins and ends: options, validation, handshake between ranks, `attach`, and `gradlane launch`."""
