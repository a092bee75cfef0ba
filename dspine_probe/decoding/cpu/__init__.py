"""Decoding on a CPU at the speed of memory: C kernels built at first use, their torch equivalent, and the engines."""
