"""Experiments, one file a question; each returns a result that can be saved as a table."""
