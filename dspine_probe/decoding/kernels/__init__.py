"""Triton kernels of the decoding path, each with its torch reference."""
