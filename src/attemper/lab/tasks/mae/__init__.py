"""Masked pre-training: from some patches of an image, without any label, what the others look like."""
