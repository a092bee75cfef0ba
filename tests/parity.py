"""The cases in which every engine must decode as the reference engine does for each prompt alone, in fp32."""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from tiny import SIZES, prompts, tiny_draft, tiny_target
from transformers import Qwen3Config, Qwen3ForCausalLM

from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.generate import Generation, generate_batch
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.decoding.weights import DRAFTS
from dspine_probe.drafts.registry import KINDS
from dspine_probe.sampling import GREEDY, Sampling
from dspine_probe.target import Target

TARGETS = {"dflash": "llama", "dspine": "qwen3"}  # other kinds decode for the Llama
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(0.8)}
ROWS = (1, 4)
CASES = [f"{kind}, {how}, {rows}" for kind, how, rows in product(KINDS, SAMPLINGS, ROWS)]
FAST = [case for case in CASES if case.split(", ")[0] in DRAFTS]
"""The cases that the fast engines compute."""


SMALLEST = {"target_layer_ids": (0,), "num_attention_heads": 2, "num_key_value_heads": 1}
"""Of a draft for `smallest_target`."""


def smallest_target() -> Target:
    """For Triton's interpreter, where every program of a kernel takes a millisecond."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **sizes}, tie_word_embeddings=False))
    return Target.from_model(model, stop_ids=())


def decode(case: str, engines: Engines, *, small: bool = False) -> list[Generation]:
    """Answers of one case, `rows` prompts at a time; all engines are given the same. `small`: little of everything."""
    kind, how, at_once = case.split(", ")
    rows = int(at_once)
    target = smallest_target() if small else tiny_target(TARGETS.get(kind, "llama"), stop_ids=(2, 9, 17))
    draft = tiny_draft(target, KINDS[kind].architecture, trimmed=40, **SMALLEST if small else {})
    sampling, listed = SAMPLINGS[how], [[5, 6], [9], [8], [30]] if small else prompts(8)
    found = []
    if small and rows == 1 and engines is not REFERENCE:
        listed = listed[:1]
    for at in range(0, len(listed), rows):
        generators = [torch.Generator().manual_seed(seed) for seed in range(at, at + rows)]
        found += generate_batch(
            target,
            draft,
            listed[at : at + rows],
            max_new_tokens=3 if small else 16,
            width=3 if small else None,
            sampling=sampling,
            generators=None if sampling.greedy else generators,
            engines=engines,
        )
    return found


def differences(case: str, engines: Engines, *, small: bool = False) -> list[int]:
    """Prompts of a case whose answers or rounds are not those of the reference engine for that prompt alone."""
    kind, how, _ = case.split(", ")
    found, expected = decode(case, engines, small=small), _expected(kind, how, small)
    expected = expected[: len(found)]
    assert all(one.rounds for one in expected if one.finish == "length")
    return [
        number
        for number, (one, other) in enumerate(zip(found, expected, strict=True))
        if (one.tokens, one.rounds) != (other.tokens, other.rounds)
    ]


@cache
def _expected(kind: str, how: str, small: bool) -> list[Generation]:
    return decode(f"{kind}, {how}, 1", REFERENCE, small=small)
