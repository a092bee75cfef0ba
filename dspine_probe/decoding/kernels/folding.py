"""A DSpine's injection weights in the form the kernels read, made once from its modules.

The readout R is only ever used through its norm and through three matrices: the gates G_r and G_p and the message M.
Those products are folded, so that all a layer reads from h is one matrix [R; G_r R; M R; G_p R], and what a true
predecessor token sends is two rows of a table. Entry points: `fold`, `code_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.drafts.injection import Injection


@dataclass(frozen=True)
class LayerInjection:
    """One layer's injection, folded.

    read: [R; G_r R; M R; G_p R], with R of `rank` rows and the other three of `message` rows each.
    write: W. bias: that of the gate.
    """

    read: Float[Tensor, "read_rows d_model"]
    write: Float[Tensor, "d_model message"]
    bias: Float[Tensor, "message"]

    @property
    def message(self) -> int:
        """Message channels."""
        return self.write.shape[1]

    @property
    def rank(self) -> int:
        """Rows of the readout."""
        return self.read.shape[0] - 3 * self.message


@dataclass(frozen=True)
class CodeTables:
    """What a true predecessor token sends: M √r e_v and G_p √r e_v for every token v."""

    message: Float[Tensor, "vocab message"]
    gate: Float[Tensor, "vocab message"]


@torch.no_grad()
def fold(injection: Injection, layer: int) -> LayerInjection:
    """The folded weights of one layer, multiplied in fp32 and rounded once."""
    readout, write = (cast(nn.Linear, m[layer]).weight for m in (injection.readouts, injection.writes))
    matrices = (injection.receiver_gate, injection.message, injection.predecessor_gate)
    products = [matrix.weight.float() @ readout.float() for matrix in matrices]
    read = torch.cat([readout.float(), *products]).to(readout.dtype)
    return LayerInjection(read, write.detach(), injection.bias.detach())


@torch.no_grad()
def code_tables(injection: Injection, codes: Float[Tensor, "vocab rank"]) -> CodeTables:
    """The tables of a draft; `codes` are unit vectors."""
    scaled = codes.float() * codes.shape[1] ** 0.5
    made = [
        F.linear(scaled, matrix.weight.float()).to(injection.bias.dtype)
        for matrix in (injection.message, injection.predecessor_gate)
    ]
    return CodeTables(*made)
