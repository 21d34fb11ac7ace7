"""Emulation: PyTorch models whose layers take the times of a profile instead of computing."""
