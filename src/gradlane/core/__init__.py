"""The nouns: Profile, Network, Plan, Policy, Timeline, their checks and their files. No I/O but `files`."""
