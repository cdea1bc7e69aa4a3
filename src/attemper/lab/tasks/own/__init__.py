"""Data of one's own: arrays, tensors, datasets of torch and of Hugging Face, and functions that return them."""
