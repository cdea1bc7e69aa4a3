"""Training: one run from its description to its result. Nothing is imported here: `loop.py` has the run."""
