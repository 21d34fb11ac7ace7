"""Comparison: one harness that trains under several schedulers in turns, for `gradlane compare`,
`bench` and `experiments`.
"""
