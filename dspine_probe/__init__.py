"""Probe the draft models of speculative decoding: hook them, train them, measure them.

Nothing heavy is imported here; take what you need from the modules themselves.
"""

__version__ = "0.1.0"
