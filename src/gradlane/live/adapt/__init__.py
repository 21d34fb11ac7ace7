"""Changes the plan of a running session: `auto` finds a policy, the tuner its knobs, replanning
follows the network.
"""
