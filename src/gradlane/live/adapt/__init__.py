"""What changes the plan of a running session: `auto`, the tuner of knobs, and policies that plan again."""
