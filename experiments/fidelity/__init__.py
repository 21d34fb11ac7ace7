"""How true the simulator is: emulated devices on emulated hosts beside what the simulator says of the same plans.

    python -m experiments.fidelity [--models ...] [--ratios ...] [--hosts ...] [--backends ...] [--policies ...] --out FOLDER

A trial is a model, a rate and a number of hosts under every policy of every backend, as `gradlane compare` runs it. It is
given nothing but the profile that was emulated, stretched to what a step without communication took, and the network that
the run itself measured.
"""
