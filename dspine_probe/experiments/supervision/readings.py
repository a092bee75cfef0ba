"""What one draft of the supervision experiment shows on the arena: hits, codes in its residual stream, and its rank.

The stream after layers 1…L of a DFlash is read at every draft slot of every block, once. `read_arm` is the entry; the
acceptance of real rounds is counted by `arena_rounds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.offline import simulate_rounds
from dspine_probe.drafts import DFlash
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import Scores
from dspine_probe.transfer import TransferSpace

OWN, FIXED, FITTED = "own readout", "principal directions", "fitted readout"
SHUFFLED = ", labels of other blocks"
READERS = (OWN, FIXED, FITTED, FIXED + SHUFFLED, FITTED + SHUFFLED)
_PENALTIES = (1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class ArmReadings:
    """Blocks are in the arena's order; layers are 1…L.

    correct: 1 where the slot's most likely token is its label, else 0.
    cosine: for each reader, cos(reading of h_l, e_label) by layer, NaN where it has no readout for a layer. The fitted
        readout is asked for the deviation from the mean code.
    effective_rank: of the stream by layer, rows at unit RMS as every reader of the stream brings them to.
    effective_rank_raw: the same of the rows as they are.
    """

    correct: Scores
    cosine: Mapping[str, Float[Tensor, "layer block draft_slot"]]
    effective_rank: Float[Tensor, "layer"]
    effective_rank_raw: Float[Tensor, "layer"]


@dataclass(frozen=True)
class OwnReadouts:
    """What a code arm was trained with: readouts of layers 1…L−1, and the codes they were aimed at."""

    weights: tuple[Float[Tensor, "rank d_model"], ...]
    codes: Float[Tensor, "vocab rank"]


@dataclass(frozen=True)
class RoundCounts:
    """Rounds of every answer of the arena, and how often slot k was put to the test and kept."""

    rounds: Float[Tensor, "answer"]
    committed: Float[Tensor, "answer"]
    reached: Float[Tensor, "answer draft_slot"]
    passed: Float[Tensor, "answer draft_slot"]


def arena_rounds(draft: DFlash, arena: Arena) -> RoundCounts:
    """Rounds of exact greedy decoding of all the arena's answers (`decoding.offline`)."""
    found = simulate_rounds(draft, arena.answers)
    slots = torch.arange(1, draft.config.num_slots + 1)
    reached, passed = [], []
    for one in found:
        kept, left = torch.tensor(one.accepted)[:, None], torch.tensor(one.left)[:, None]
        reached.append(((kept >= slots - 1) & (left >= slots)).double().sum(0))
        passed.append((kept >= slots).double().sum(0))
    return RoundCounts(
        torch.tensor([float(len(one.anchors)) for one in found], dtype=torch.float64),
        torch.tensor([float(sum(one.committed)) for one in found], dtype=torch.float64),
        torch.stack(reached),
        torch.stack(passed),
    )


@torch.no_grad()
def read_arm(
    draft: DFlash,
    arena: Arena,
    space: TransferSpace,
    codes: Float[Tensor, "vocab rank"],
    own: OwnReadouts | None = None,
    *,
    seed: int = 0,
) -> ArmReadings:
    """Read a draft's residual stream on all blocks.

    Args:
        draft: in fp32.
        arena: blocks as wide as the draft's.
        space: its principal directions are the common fixed readout.
        codes: e_v of every token; the common readers are compared with these.
        own: the arm's own readouts, if it has any.
        seed: of the permutation that gives blocks other blocks' labels.
    """
    streams, labels, correct = _streams(draft, arena)
    wanted = codes[labels]
    generator = torch.Generator().manual_seed(seed)
    other = wanted[torch.randperm(len(wanted), generator=generator)]
    by_reader: dict[str, list[Tensor]] = {name: [] for name in READERS}
    for layer, stream in enumerate(streams):
        if own is None or layer >= len(own.weights):
            by_reader[OWN].append(torch.full(labels.shape, torch.nan))
        else:
            read = stream @ own.weights[layer].T
            by_reader[OWN].append(F.cosine_similarity(read, own.codes[labels], dim=-1))
        fixed, (fitted, mean) = stream @ space.basis, fitted_readout(stream, wanted, arena.prompt)
        for suffix, codes_of in (("", wanted), (SHUFFLED, other)):
            by_reader[FIXED + suffix].append(F.cosine_similarity(fixed, codes_of, dim=-1))
            by_reader[FITTED + suffix].append(F.cosine_similarity(fitted, codes_of - mean, dim=-1))
    return ArmReadings(
        correct,
        {name: torch.stack(found) for name, found in by_reader.items()},
        torch.stack([effective_rank(_unit_rms(stream).flatten(0, 1)) for stream in streams]),
        torch.stack([effective_rank(stream.flatten(0, 1)) for stream in streams]),
    )


def effective_rank(rows: Float[Tensor, "n d_model"]) -> Float[Tensor, ""]:
    """exp(−Σ p_i log p_i) with p_i = σ_i / Σσ, σ the singular values of the centred rows (Roy and Vetterli, 2007)."""
    centred = rows.double() - rows.double().mean(0)
    sigma = torch.linalg.eigvalsh(centred.T @ centred).clamp(min=0).sqrt()
    share = sigma / sigma.sum()
    return torch.special.entr(share).sum().exp()


def _streams(
    draft: DFlash, arena: Arena
) -> tuple[Float[Tensor, "layer block draft_slot d_model"], Int[Tensor, "block draft_slot"], Scores]:
    """Residual stream after every layer, labels, and hits."""
    place = draft.fc.weight
    streams, labels, correct = [], [], []
    for cpu_batch in arena.batches():
        batch = cpu_batch.to(place.device)
        real = batch.real.flatten()
        context = draft.encode_context(batch.taps.to(place.dtype))
        states = draft.run(context, batch.anchor_tokens, batch.anchors)
        proposed = draft.to_tokens(draft.logits(states.hidden[:, 1:]).argmax(-1))
        streams.append(torch.stack([h[real, 1:].float() for h in states.residuals]).cpu())
        labels.append(batch.tokens[real, 1:].cpu())
        correct.append((proposed == batch.tokens[:, 1:])[real].float().cpu())
    return torch.cat(streams, dim=1), torch.cat(labels), torch.cat(correct)


def fitted_readout(
    stream: Float[Tensor, "block draft_slot d_model"],
    wanted: Float[Tensor, "block draft_slot rank"],
    prompt: Int[Tensor, "block"],
) -> tuple[Float[Tensor, "block draft_slot rank"], Float[Tensor, "block 1 rank"]]:
    """Codes read by ridge regression from the stream at unit RMS, less their mean; and that mean, for every block.

    Each half of the prompts is read by what the other half gave; the penalty is chosen inside the fitting half, by
    prompts too. Compared with deviations from the mean, knowing which tokens are frequent earns nothing.
    """
    rows = _unit_rms(stream)
    read, centre = torch.empty_like(wanted), torch.empty_like(wanted[:, :1])
    for half in (0, 1):
        seen, held = prompt % 2 != half, prompt % 2 == half
        fit = seen & (prompt // 2 % 2 == 0)
        test = seen & ~fit

        def score(penalty: float, fit: Tensor = fit, test: Tensor = test) -> float:
            found, mean = _ridge_read(rows, wanted, fit, test, penalty)
            return float(F.cosine_similarity(found, wanted[test] - mean, dim=-1).mean())

        read[held], centre[held] = _ridge_read(rows, wanted, seen, held, max(_PENALTIES, key=score))
    return read, centre


def _ridge_read(rows: Tensor, wanted: Tensor, fit: Tensor, held: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """`held` rows read by a regression on `fit` rows; `penalty` is in units of a coordinate's mean square, 1."""
    x, y = rows[fit].flatten(0, 1), wanted[fit].flatten(0, 1)
    mean_x, mean_y = x.mean(0), y.mean(0)
    x = x - mean_x
    gram = x.T @ x + penalty * len(x) * torch.eye(x.shape[1])
    return (rows[held] - mean_x) @ torch.linalg.solve(gram, x.T @ (y - mean_y)), mean_y


def _unit_rms(stream: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
    return F.rms_norm(stream, stream.shape[-1:])
