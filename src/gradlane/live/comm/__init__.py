"""Communication of a session: the driver of its Dispatcher, the control channel between ranks, and how a job fails."""
