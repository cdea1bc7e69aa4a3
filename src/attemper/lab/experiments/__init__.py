"""Experiments from the papers, ready to run: train a few arms, look inside them, and put both side by side."""
