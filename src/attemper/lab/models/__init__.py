"""Models: the small ones of the papers, and those of timm and Transformers, by name."""
