"""In place of CUDA graphs: like a graph, every replay writes into the tensors that the capture returned."""


def overwriting(run):
    """A capture whose outputs stay where they are."""
    outputs = run()

    def replay() -> None:
        for kept, fresh in zip(outputs, run(), strict=True):
            if 0 not in kept.stride():  # an expanded constant
                kept.copy_(fresh)

    return replay, outputs
