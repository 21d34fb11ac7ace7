"""What several commands take: types of options, models and networks by name, knobs, progress."""
