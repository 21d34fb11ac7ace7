"""A session: one model attached on one rank, with its guards, deferred updates and gradients."""
