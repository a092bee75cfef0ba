"""Triton kernels of the decoding path, each with the same arithmetic in torch beside it.

`injection`, `last_write`, `candidates`, `walk`: DSpine's own. `layer_ops`, `block_attention`: of any decoder layer. The
entry function of each takes tensors and uses Triton where it can run, torch elsewhere. `benchmarks/gpu` compares them
with float64, compiles them without a GPU and times them.
"""
