"""The shaped links of a lab: laid, given rate, delay and loss, changed while ranks run, and sampled."""
