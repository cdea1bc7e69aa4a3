"""Curves while runs go on: TensorBoard, trackio, Weights & Biases, and whatever other packages add."""
