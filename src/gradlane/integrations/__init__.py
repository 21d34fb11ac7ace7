"""Trainers of others with their DistributedDataParallel scheduled: one module each, imported by whoever names it.

Under `gradlane launch --ddp` a script needs none of them. They are for scripts that start otherwise:
by `accelerate launch`, by torchrun, by Lightning's own launcher or by Ray Train.
"""
