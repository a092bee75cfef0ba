"""A decoded answer and a DSpine's gates in it: one round at a time, layer by layer.

`trace_gates` decodes a prompt and keeps the gates of every round, `GateTrace.figure` draws one layer of one round as a
still figure, and `GateView` puts two sliders under it. Where widgets do not render, a view shows the still figure, and
in plain text what that figure says.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from dspine_probe.decoding.generate import generate
from dspine_probe.decoding.generation import Round
from dspine_probe.drafts import DSpine
from dspine_probe.errors import UsageError
from dspine_probe.experiments.gates.readings import gate_names, spine_of
from dspine_probe.hooks import HookedDraft
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import CATEGORICAL, INK, interval_bars, layout, numbers
from dspine_probe.target import Target

_FATES = {"accepted": ("kept", 0, ""), "rejected": ("refused", 1, "/"), "unused": ("not reached", 4, ".")}
_SPREAD = (0.1, 0.9)


@dataclass(frozen=True)
class GateTrace:
    """The rounds of one answer, with the gates that stood in each.

    gates: at [round, l, t − 1], the gate of slot t in layer l + 1, channel by channel, 0…1.
    drafted: the proposed tokens of every round, spelled out.
    before: the text that each round continues, its last few tokens.
    """

    rounds: tuple[Round, ...]
    gates: Float[Tensor, "round layer draft_slot message"]
    drafted: tuple[tuple[str, ...], ...]
    before: tuple[str, ...]

    def table(self, layer: int, round: int) -> pd.DataFrame:
        """One layer (1…L) of one round (1…): each slot's token, its fate, mean gate and the spread over channels.

        Raises:
            UsageError: there is no such layer or round.
        """
        for name, value, most in (("layer", layer, self.gates.shape[1]), ("round", round, len(self.rounds))):
            if not 1 <= value <= most:
                raise UsageError(f"{name} is {value}; this trace has {name}s 1…{most}.")
        tokens, gates = self.drafted[round - 1], self.gates[round - 1, layer - 1]
        low, high = gates.quantile(torch.tensor(_SPREAD), dim=-1)
        return pd.DataFrame(
            {
                "slot": range(1, len(tokens) + 1),
                "token": tokens,
                "fate": [_FATES[fate][0] for fate in self.rounds[round - 1].fates],
                "gate": numbers(gates.mean(-1)),
                "low": numbers(low),
                "high": numbers(high),
            }
        )

    def figure(self, layer: int, round: int) -> FigureBlock:
        """Gates by slot under the drafted tokens, coloured by what became of them."""
        table = self.table(layer, round)
        title = f"Gates of layer {layer} in round {round}"
        figure = layout(go.Figure(_traces(table)), height=380)
        figure.update_xaxes(tickvals=table["slot"].tolist(), ticktext=_labels(table), title_text="drafted token")
        figure.update_yaxes(range=[0, 1], title_text="gate, mean over channels")
        figure.update_layout(title={"text": title, "font": {"size": 14}}, barmode="overlay")
        caption = (
            "How far each slot opens its gate for its predecessor. Bars: mean over message channels; whiskers: the "
            "tenth and ninetieth percentile of the channels. Colour and hatching: what verification did with the token."
        )
        return FigureBlock(figure, title, caption, self.describe(layer, round), table)

    def describe(self, layer: int, round: int) -> str:
        """What the figure shows, in a sentence."""
        rows = self.table(layer, round).itertuples()
        slots = "; ".join(f"slot {r.slot} {r.token!r} {r.gate:.2f}, {r.fate}" for r in rows)
        return f"Layer {layer}, round {round}, after “…{self.before[round - 1]}”: {slots}."


def trace_gates(target: Target, draft: DSpine, prompt_ids: Sequence[int], *, max_new_tokens: int) -> GateTrace:
    """Decode greedily and keep the gates of every round.

    Raises:
        UsageError: the draft is no DSpine, or the answer ended before a round was drafted.
    """
    with HookedDraft(draft) as hooked:
        seen: list[list[Tensor]] = [[] for _ in spine_of(hooked).blocks]

        def keep(layer: int) -> Any:
            def hook(gate: Float[Tensor, "block draft_slot message"], hook: HookPoint) -> None:
                seen[layer].append(gate[0].detach().float().cpu().clone())

            return hook

        with hooked.hooks([(name, keep(layer)) for layer, name in enumerate(gate_names(len(draft.blocks)))]):
            answer = generate(target, draft, prompt_ids, max_new_tokens=max_new_tokens)
    if not answer.rounds:
        raise UsageError("the answer ended with its first token, so nothing was drafted; give another prompt.")
    text = [*answer.prompt_ids, *answer.tokens]
    return GateTrace(
        answer.rounds,
        torch.stack([torch.stack(layer) for layer in seen], dim=1),
        tuple(tuple(target.decode([token]) for token in one.drafted) for one in answer.rounds),
        tuple(target.decode(text[max(0, one.anchor - 5) : one.anchor + 1]) for one in answer.rounds),
    )


class GateView(ipywidgets.VBox):
    """Sliders for layer and round over a trace's figure, and the same in words for who cannot see it."""

    def __init__(self, trace: GateTrace, *, layer: int = 1, round: int = 1) -> None:
        self.trace, first = trace, trace.figure(layer, round)
        self.layer = _slider("layer", layer, trace.gates.shape[1])
        self.round = _slider("round", round, len(trace.rounds))
        self.figure = go.FigureWidget(first.figure)
        self.words = ipywidgets.HTML(html.escape(first.alt))
        for slider in (self.layer, self.round):
            slider.observe(self._redraw, names="value")
        super().__init__([ipywidgets.HBox([self.layer, self.round]), self.figure, self.words])

    def _redraw(self, _change: object) -> None:
        block = self.trace.figure(self.layer.value, self.round.value)
        with self.figure.batch_update():
            for shown, new in zip(self.figure.data, block.figure.data, strict=True):
                shown.update(x=new.x, y=new.y, error_y=new.error_y.to_plotly_json())
            new = block.figure.layout
            self.figure.update_layout(title_text=new.title.text, xaxis_ticktext=new.xaxis.ticktext)
        self.words.value = html.escape(block.alt)

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(**kwargs) or {}
        still = self.trace.figure(self.layer.value, self.round.value)
        figure = json.loads(still.figure.to_json())
        return {"application/vnd.plotly.v1+json": figure, **bundle, "text/plain": still.alt}


def _slider(name: str, value: int, most: int) -> ipywidgets.IntSlider:
    return ipywidgets.IntSlider(value, 1, most, description=name, tooltip=f"{name} 1…{most}")


def _traces(table: pd.DataFrame) -> list[go.Bar]:
    """A series for each fate, empty where no token met it, so that a live figure always has the same three."""
    traces = []
    for name, colour, pattern in _FATES.values():
        rows = table[table["fate"] == name]
        marker = {"color": CATEGORICAL[colour], "pattern": {"shape": pattern, "fgcolor": INK}}
        bars = interval_bars(rows["gate"], rows["low"], rows["high"])
        x, y = rows["slot"].tolist(), rows["gate"].tolist()
        traces.append(go.Bar(x=x, y=y, error_y=bars, name=name, marker=marker, showlegend=True))
    return traces


def _labels(table: pd.DataFrame) -> list[str]:
    """Slot numbers over visible spellings."""
    shown = [html.escape(token.replace("\n", "↵")) or "∅" for token in table["token"]]
    return [f"{slot}<br>{token}" for slot, token in zip(table["slot"], shown, strict=True)]
