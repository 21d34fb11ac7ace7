"""Trainers of others, scheduled: one module each, imported by whoever names it.

`accelerate`, `transformers`, `lightning` and `ray` put gradlane's DistributedDataParallel into theirs. Under
`gradlane launch --ddp` a script needs none of them; they are for scripts that start otherwise: by `accelerate launch`, by
torchrun, by Lightning's own launcher or by Ray Train. `keras` is a callback for Keras 3.
"""
