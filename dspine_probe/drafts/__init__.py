"""Draft models, one file each: backbone, heads and their checkpoints."""
