"""The target: a frozen causal language model whose tokens the drafts try to guess.

`Target.load` takes the embedded default, a hub id or a local folder; `Target.from_model` wraps a model already in
memory. A `Target` encodes chats, knows where answers stop, gives tapped and final hidden states, and hands out the raw
embedding and head. It never generates (see `decoding/`) and never changes the model it wraps: taps are read by plain
forward hooks that are gone when the call returns.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dspine_probe.chat import chat_ids
from dspine_probe.config import check_taps
from dspine_probe.errors import UsageError
from dspine_probe.geometry import TargetGeometry
from dspine_probe.pretrained import EMBEDDED, declared_stop_ids, read_pretrained, refuse_unsupported

# special tokens that never occur in chats and whose embedding rows training left untouched
_SPARE_TOKENS = ("<empty_output>",)


@dataclass(frozen=True)
class TargetStates:
    """Hidden states of one target pass.

    taps: the residual stream after each tapped layer, side by side in the order asked for.
    final: the stream after the last layer and the final norm, what the head reads.
    """

    taps: Float[Tensor, "batch ctx taps_d_model"]
    final: Float[Tensor, "batch ctx d_model"]


class Target(TargetGeometry):
    """A frozen Hugging Face causal LM with its tokenizer; make one with `load` or `from_model`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        stop_ids: Sequence[int] | None = None,
    ) -> None:
        refuse_unsupported(model, name)
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        if stop_ids is None:
            stop_ids = declared_stop_ids(model, tokenizer)
        else:
            self.check_ids(stop_ids, "stop ids")
        self.stop_ids = tuple(stop_ids)

    @classmethod
    def load(
        cls, name: str | Path = EMBEDDED, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> "Target":
        """Load a target by name.

        Args:
            name: "embedded" (SmolLM2-135M-Instruct, downloaded and converted on first use), a hub id, or a folder.
            dtype: type of the weights; the stored values are cast.
            device: where the weights go.

        Raises:
            UsageError: the name, dtype or device is not one of the allowed forms.
            ProbeError: the target exists but cannot be fetched or read.
        """
        model, tokenizer = read_pretrained(name, dtype, device)
        return cls(model, tokenizer, str(name))

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "in-memory",
        stop_ids: Sequence[int] | None = None,
    ) -> "Target":
        """Wrap a model in memory; it is frozen and put in evaluation mode.

        Args:
            model: a causal LM of Llama or Qwen build (decoder layers, final norm, one linear head).
            tokenizer: needed for `encode_chat` and `decode` only.
            name: how messages call it.
            stop_ids: ids that end an answer; by default those the model and its tokenizer declare.

        Raises:
            UsageError: the model is built in a way the drafts cannot follow.
        """
        return cls(model, tokenizer, name, stop_ids)

    # ---- weights

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the hidden states."""
        return self.embedding.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding rows included."""
        return int(self.embedding.shape[0])

    @property
    def embedding(self) -> Float[Tensor, "vocab d_model"]:
        """The input embedding itself, not a copy."""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Float[Tensor, "vocab d_model"]:
        """The output head itself, not a copy; the same object as `embedding` when they are tied."""
        return self.model.get_output_embeddings().weight

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one parameter."""
        return self.head is self.embedding

    # ---- text

    def encode_chat(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Token ids of a chat up to the point where the assistant begins to answer.

        Args:
            prompt: one user message, or the messages as {"role", "content"} dictionaries. The template's own system
                line is kept; thinking is switched off where the template knows the switch.

        Raises:
            UsageError: the prompt is empty, not text or longer than the context, or the target has no chat template
                or one that does not take these messages.
        """
        ids = chat_ids(self._tokenizer(), prompt, self.name)
        if len(ids) > self.max_positions:
            raise UsageError(
                f"the prompt has {len(ids)} tokens and target '{self.name}' takes {self.max_positions}; shorten it"
            )
        self.check_ids(ids, "the tokenizer's ids")
        return ids

    def decode(self, ids: Sequence[int] | Int[Tensor, " ctx"], *, skip_special: bool = False) -> str:
        """The text of token ids; special tokens are spelled out unless `skip_special`.

        Raises:
            UsageError: an id outside the embedding, or the target has no tokenizer.
        """
        self.check_ids(ids)
        return str(self._tokenizer().decode(ids, skip_special_tokens=skip_special))

    def check_ids(self, ids: Sequence[int] | Int[Tensor, "..."], what: str = "token ids") -> None:
        """Refuse ids outside 0…vocab_size − 1: a negative one would silently read the embedding from its end.

        Raises:
            UsageError: naming `what` and the first id that does not fit.
        """
        given = torch.as_tensor(ids).flatten()
        bad = given[(given < 0) | (given >= self.vocab_size)]
        if len(bad):
            raise UsageError(
                f"{what} hold {int(bad[0])}; they must lie in 0..{self.vocab_size - 1}, the target's embedding"
            )

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise UsageError(f"target '{self.name}' has no tokenizer; give one to Target.from_model")
        return self.tokenizer

    # ---- states

    @torch.no_grad()
    def hidden_states(
        self,
        ids: Int[Tensor, "batch ctx"],
        taps: Sequence[int],
        *,
        attention_mask: Int[Tensor, "batch ctx"] | None = None,
    ) -> TargetStates:
        """Run the target once and read its states; no logits are computed.

        Args:
            ids: token ids, shorter rows padded on the right.
            taps: layer ids counted from 0; tap l is the stream after layer l, `hidden_states[l + 1]` of transformers.
                The last layer is refused: transformers gives its state normed only, see `TargetStates.final`.
            attention_mask: 1 on tokens and 0 on right padding; the states of padding mean nothing.

        Raises:
            UsageError: a tap, a token id, the length or the mask does not fit the target.
        """
        self._check_batch(ids, attention_mask)
        with self.capture(taps) as caught:
            decoder = self.model.base_model
            final = decoder(input_ids=ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        empty = final.new_empty((*final.shape[:2], 0))
        return TargetStates(taps=torch.cat([empty, *(caught[tap] for tap in taps)], dim=-1), final=final)

    @contextmanager
    def capture(self, taps: Sequence[int]) -> Iterator[dict[int, Float[Tensor, "batch ctx d_model"]]]:
        """While the block runs, each pass of the model leaves the state after every tapped layer in the dictionary.

        Raises:
            UsageError: a tap does not fit the target.
        """
        check_taps(taps, self.num_layers)
        caught: dict[int, Tensor] = {}
        layers = self.model.base_model.layers
        handles = [layers[tap].register_forward_hook(_catch(caught, tap)) for tap in taps]
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, final: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        """Scores over the vocabulary from final hidden states."""
        return functional.linear(final, self.head)

    def _check_batch(self, ids: Tensor, attention_mask: Tensor | None) -> None:
        if ids.ndim != 2 or ids.numel() == 0:
            raise UsageError(f"token ids have shape {tuple(ids.shape)}; give [batch, ctx] with at least one token")
        if ids.shape[1] > self.max_positions:
            raise UsageError(
                f"the context has {ids.shape[1]} tokens and target '{self.name}' takes {self.max_positions}; shorten it"
            )
        self.check_ids(ids)
        if attention_mask is None:
            return
        if attention_mask.shape != ids.shape:
            raise UsageError(f"the attention mask has shape {tuple(attention_mask.shape)}, ids {tuple(ids.shape)}")
        if bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
            raise UsageError("the attention mask has padding before a token; pad on the right")


def choose_mask_token(target: Target) -> int:
    """The id whose embedding row stands for "not known yet" in a draft's block.

    Drafts read this row from the target's embedding, so it must be one that text never uses: for Qwen3 the first
    padding row past the tokenizer (151669); for SmolLM2, which has no padding rows, the special token
    "<empty_output>" (16), one of eleven special tokens whose rows are identical because chat training never saw them.

    Raises:
        UsageError: there is neither; pass a mask token by hand.
    """
    tokenizer = target.tokenizer
    if tokenizer is not None:
        for token in _SPARE_TOKENS:
            found = tokenizer.get_vocab().get(token)
            if found is not None:
                return int(found)
        if len(tokenizer) < target.vocab_size:
            return len(tokenizer)
    raise UsageError(f"target '{target.name}' has no spare embedding row; pass the mask token id yourself")


def _catch(caught: dict[int, Tensor], tap: int) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        caught[tap] = output if isinstance(output, Tensor) else output[0]

    return hook
