"""Tiny random targets, drafts and prompts that the tests share."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dspine_probe.config import DFLASH, DraftConfig
from dspine_probe.drafts import Context, DFlash, Draft
from dspine_probe.drafts.dflash2 import DFlash2Config
from dspine_probe.drafts.domino import DominoConfig
from dspine_probe.drafts.dspark import DSparkConfig
from dspine_probe.drafts.eagle3 import Eagle3Config
from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.drafts.registry import KINDS
from dspine_probe.target import Target

VOCAB, WIDTH, LAYERS = 64, 32, 5
PARTS = {
    "dspine": DSpineConfig(transfer_rank=8, message_size=6, top_k=4),
    "dflash2": DFlash2Config(selector_rank=6, selector_top_k=4),
    "dspark": DSparkConfig(markov_rank=6),
    "eagle3": Eagle3Config(),
    "domino": DominoConfig(emb_dim=6, gru_hidden_dim=5),
}
"""Of tiny drafts, for kinds that have a part of their own."""
MASK = 63
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "initializer_range": 0.4,  # large enough that a random target does not repeat one token
}


def tiny_target(kind: str = "llama", *, seed: int = 0, stop_ids: tuple[int, ...] = (2,)) -> Target:
    """A Llama with tied embeddings, or a Qwen3 whose heads are wider together than its residual stream."""
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False))
    return Target.from_model(model, name=f"tiny-{kind}", stop_ids=stop_ids)


def tiny_config(target: Target, architecture: str, **changes: object) -> DraftConfig:
    """A draft of two layers that drafts four tokens."""
    kind = next(kind for kind in KINDS.values() if kind.architecture == architecture)
    fields = {
        "architecture": architecture,
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": kind.layers or 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
        "block_size": 5,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 2),
        "num_target_layers": target.num_layers,
        "is_causal": kind.causal,
        "part": PARTS.get(kind.name),
    }
    return DraftConfig(**{**fields, **changes})


def tiny_draft(
    target: Target, architecture: str = DFLASH, *, seed: int = 1, trimmed: int | None = None, **changes: object
) -> Draft:
    """A random draft, writes included; `trimmed` keeps that many random tokens of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    vocabulary = None
    if trimmed is not None:
        vocabulary = torch.randperm(target.vocab_size, generator=generator)[:trimmed].sort().values
    config = tiny_config(target, architecture, draft_vocab_size=trimmed, **changes)
    kind = next(kind for kind in KINDS.values() if kind.architecture == architecture)
    made = kind.draft(config, target.embedding, target.head, vocabulary=vocabulary)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return made.eval()


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    """Random prompts of 1 to 19 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    return [torch.randint(3, MASK, (n,), generator=generator).tolist() for n in lengths]


class Scripted(DFlash):
    """Knows the whole sequence and proposes it, except at the positions in `wrong`; for one sequence at a time."""

    tokens: list[int]
    wrong: set[int]
    exact_context = True

    def draft_greedy(
        self, context: Context, anchor_tokens: Tensor, anchors: Tensor, *, width: int | None = None
    ) -> Tensor:
        """The known tokens after the anchor, and 7 behind the end."""
        at, slots = int(anchors), (width or self.config.block_size) - 1
        assert int(anchor_tokens) == self.tokens[at]
        if self.exact_context:
            assert context.length == at, "the context holds every committed row and no other"
        known = [*self.tokens[at + 1 : at + 1 + slots], *[7] * slots][:slots]
        return torch.tensor([[(t + (at + 1 + i in self.wrong)) % VOCAB for i, t in enumerate(known)]])


def scripted(target: Target, tokens: list[int], wrong: set[int]) -> Scripted:
    """A draft that knows `tokens`."""
    draft = Scripted(tiny_config(target, DFLASH), target.embedding, target.head)
    draft.tokens, draft.wrong = tokens, wrong
    return draft
