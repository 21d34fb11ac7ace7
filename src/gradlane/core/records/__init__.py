"""What a run leaves for others to read: what its Dispatcher answered, what a search tried, which knobs it kept."""
