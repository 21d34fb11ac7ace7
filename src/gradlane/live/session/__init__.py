"""A session: one model attached on one rank, and the guards, updates and gradients that belong to it."""
