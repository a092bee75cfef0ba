"""Triton kernels of the decoding path, each with the same arithmetic in torch beside it.

`injection`, `last_write`, `candidates`, `walk`: DSpine's own. `layer_ops`, `block_attention`: of any decoder layer.
`markov`, `gru`: the serial heads they are compared with. The entry function of each takes tensors and uses Triton where
it can run, torch elsewhere. `checks` compares them with float64; `compile_check` compiles them without a GPU.
"""
