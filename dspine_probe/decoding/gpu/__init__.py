"""Decoding on a GPU: fused layers over static caches, and the engines whose steps are captured as graphs."""
