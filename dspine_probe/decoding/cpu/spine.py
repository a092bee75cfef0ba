"""DSpine beside its layers, in C: the injections, and the scores of all pairs of adjacent candidates."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspine_probe.decoding.cpu.kernels import FLOAT, LONG, Kernels
from dspine_probe.decoding.cpu.stack import check_even, floats
from dspine_probe.decoding.cpu.structs import InjectionC, LastWriteC, at
from dspine_probe.drafts import Draft
from dspine_probe.drafts.injection import Injection


class SpineKernels:
    """Injection and last write of a DSpine, with its weights packed.

    codes: √r e of every token, in the kernels' dtype. top_k: candidates of a slot.

    Raises:
        UsageError: a size is odd.
    """

    def __init__(self, kernels: Kernels, draft: Draft) -> None:
        injection = cast(Injection, draft.injection)
        assert draft.codes is not None and draft.candidate_count is not None
        self.kernels, self.width, self.top_k = kernels, draft.config.hidden_size, draft.candidate_count
        self.rank, self.message = draft.code_sizes
        check_even(**{"rank": self.rank, "message size": self.message})
        self.codes = (draft.codes.detach() * self.rank**0.5).to(kernels.dtype)
        sends = torch.cat([injection.predecessor_gate.weight, injection.message.weight]).detach().float()
        own_codes = draft.codes if draft.vocabulary is None else draft.codes[draft.vocabulary]
        # G_p √r e and M √r e of every token of the draft's vocabulary.
        self.sent = kernels.memory.copy((own_codes.float() * self.rank**0.5 @ sends.T).to(kernels.dtype))
        self.head = kernels.memory.copy(draft.head.detach().to(kernels.dtype))
        self.matrices = [
            (kernels.matrix(cast(nn.Linear, readout).weight), kernels.matrix(cast(nn.Linear, write).weight))
            for readout, write in zip(injection.readouts, injection.writes, strict=True)
        ]
        self.mix = kernels.matrix(torch.cat([injection.receiver_gate.weight.float(), sends]))
        self.bias, self.norm = floats(injection.bias), floats(draft.ln_final.weight)
        sizes = self.width, self.rank, self.message
        bias = at(self.bias, FLOAT, self.message)
        self.structs = [
            InjectionC(*sizes, readout.struct, self.mix.struct, write.struct, bias, 1)
            for readout, write in self.matrices
        ]
        self.channels = kernels.padded(3 * self.message)
        self.last = LastWriteC(
            ctypes.pointer(self.structs[-1]),
            at(self.norm, FLOAT, self.width),
            draft.config.rms_norm_eps,
            self.sent.data_ptr(),
            self.head.data_ptr(),
        )

    def inject(
        self, layer: int, x: Float[Tensor, "row d_model"], anchor_codes: Float[Tensor, "block rank"]
    ) -> Float[Tensor, "row mixed"]:
        """Inject in place; what each slot reads and sends, of use to `transitions` alone. Rows are whole blocks.

        `anchor_codes` are of the kernels' dtype.
        """
        self.structs[layer].threads = torch.get_num_threads()
        blocks, rows = len(anchor_codes), len(x)
        mixed = torch.empty(rows, self.channels, dtype=FLOAT, device="cpu")
        codes = at(anchor_codes, self.kernels.dtype, blocks, self.rank)
        given = at(x, FLOAT, rows, self.width), codes, mixed.data_ptr()
        self.kernels.call("inject", byref(self.structs[layer]), blocks, rows // blocks, *given)
        return mixed

    def transitions(
        self,
        states: Float[Tensor, "row d_model"],
        mixed: Float[Tensor, "row mixed"],
        candidates: Int[Tensor, "block draft_slot k"],
    ) -> Float[Tensor, "block draft_slot k k"]:
        """Refined scores of all pairs of adjacent candidates.

        Args:
            states: rows before the last injection, slot 0 included.
            mixed: what that injection returned.
            candidates: indices of the draft's vocabulary, in any order.
        """
        blocks, drafted, k = candidates.shape
        rows = blocks * (drafted + 1)
        scores = torch.empty(blocks, drafted, k, k, dtype=FLOAT, device="cpu")
        given = at(states, FLOAT, rows, self.width), at(mixed, FLOAT, rows, self.channels)
        others = at(candidates, LONG, blocks, drafted, k), scores.data_ptr()
        self.kernels.call("transitions", byref(self.last), blocks, drafted + 1, k, *given, *others)
        return scores
