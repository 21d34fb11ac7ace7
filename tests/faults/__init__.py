"""Faults of the control channel, simulated: all ranks of a job in one process, under a clock and a network that a seed decides.

    world.py     the clock, the network, and processes that run, stop and die
    channel.py   what the live channel does around a `ControlProtocol`, over that network
    rank.py      a rank's script: it attaches, decides, sums, changes plans, closes
    job.py       what a seed means: ranks, delays, harm
    checks.py    what has to be so at the end, whatever the harm was
    mutants.py   defects that the checks have to find

`python -m tests.faults --help` runs any number of seeds.
"""
