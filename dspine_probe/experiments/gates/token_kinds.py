"""What kind of token something is, by its spelling: start of a word, continuation, digits, white space and so on.

Kinds come from the target's own tokenizer and from the token alone, so a word that opens a line counts as a
continuation: it has no space before it. Entry point: `kinds_of`.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

KINDS = ("word start", "word continuation", "digit", "white space", "punctuation", "code symbol", "special", "other")
_PUNCTUATION = frozenset(".,;:!?'\"()-–—…‘’“”")
_CODE = frozenset("{}[]<>=+*/\\%&|^~_@#$`")
_SPACE_MARK = "▁"  # how SentencePiece spells a leading space, which its decoder drops
_BROKEN = "\ufffd"  # part of a character that takes several tokens


def kinds_of(tokenizer: PreTrainedTokenizerBase, tokens: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The kind of every token, as an index into `KINDS`."""
    distinct, where = tokens.unique(return_inverse=True)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    kinds = [
        KINDS.index("special" if token in special else _kind(_spelling(tokenizer, token)))
        for token in distinct.tolist()
    ]
    return torch.tensor(kinds)[where.cpu()].view(tokens.shape)


def _spelling(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    text = str(tokenizer.decode([token]))
    raw = str(tokenizer.convert_ids_to_tokens(token))
    return f" {text}" if raw.startswith(_SPACE_MARK) and not text.startswith(" ") else text


def _kind(text: str) -> str:
    body = text.strip()
    if not body:
        return "white space"
    if body.isdecimal():
        return "digit"
    if all(c.isalpha() or c in "'’" for c in body) and any(c.isalpha() for c in body):
        return "word start" if text[0].isspace() else "word continuation"
    if _BROKEN in body or any(c.isalnum() for c in body):
        return "other"
    if any(c in _CODE for c in body):
        return "code symbol"
    return "punctuation" if all(c in _PUNCTUATION or c.isspace() for c in body) else "other"
