"""Planning: from a policy to a checked plan, the network that was fitted, and searches among plans, sizes and policies."""
