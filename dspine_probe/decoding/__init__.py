"""Decoding with the target and with drafts: batched, greedy, speculative."""
