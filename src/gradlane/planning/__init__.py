"""Planning: from a policy to a checked plan; fitted networks; searches for sizes and policies."""
