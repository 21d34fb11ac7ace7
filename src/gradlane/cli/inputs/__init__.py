"""What several commands take: types of options, models, devices and networks by name, knobs, a progress bar."""
