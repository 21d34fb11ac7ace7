"""Communication of a session: the driver of its messages, the control channel, and failures."""
