"""The data types: Profile, Network, Plan, Policy, Timeline; their checks and files. Only `files`
does I/O.
"""
