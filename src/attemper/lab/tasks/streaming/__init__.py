"""Data sets of a million images and more: WebDataset shards and Hugging Face data sets, read while training runs."""
