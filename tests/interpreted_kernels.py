"""Run by test_kernels.py in a process of its own, because TRITON_INTERPRET must be set before kernels are imported.

Prints one JSON object: kernel errors by problem, and what single cases gave.
"""

import itertools
import json
from dataclasses import asdict, replace

import torch

from benchmarks.gpu.checks import COMPARISONS, check_kernels
from benchmarks.gpu.markov import MarkovHead, markov_tokens
from benchmarks.gpu.problem import EMBEDDED, ODD, Problem
from dspine_probe.decoding.kernels.candidates import top_candidates
from dspine_probe.decoding.kernels.launch import usable
from dspine_probe.decoding.kernels.walk import plan_walk, unit_parts, walk

SPINE = ("injection", "pair scores", "walk, greedy")
PROBLEMS = {
    "odd bf16": (ODD, torch.bfloat16, tuple(COMPARISONS)),
    "many blocks fp32": (
        replace(ODD, slots=3, heads=2, kv_heads=1, batch=22),
        torch.float32,
        tuple(name for name in COMPARISONS if "rotate" not in name),  # a program per row: more add nothing
    ),
    "long rows fp32": (
        replace(ODD, slots=3, batch=1, vocab=17_001),
        torch.float32,
        ("candidates", "Markov head", "GRU head"),
    ),
    "embedded bf16": (replace(EMBEDDED, slots=4, vocab=401), torch.bfloat16, SPINE),
}
K, SLOTS, DRAWS, TOGETHER = 3, 3, 200_000, 8192


def errors() -> dict[str, list[dict]]:
    made = {}
    for name, (sizes, dtype, kernels) in PROBLEMS.items():
        problem = Problem.make(sizes, dtype, "cpu", torch.Generator().manual_seed(0))
        made[name] = [{**asdict(check), "passed": check.passed} for check in check_kernels(problem, kernels)]
    return made


def distribution_of_the_walk() -> dict[str, object]:
    """Shares of all paths over many draws, beside the products of the table's own softmaxes."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(1, SLOTS, K, K, generator=generator) * 1.5
    table[:, 0] = table[:, 0, :1]
    candidates = torch.arange(K).expand(DRAWS, SLOTS, K).contiguous()
    noise = torch.rand(DRAWS, SLOTS, generator=generator)
    scores = table.expand(DRAWS, -1, -1, -1).contiguous()
    parts = unit_parts(scores)
    launches, walked = plan_walk(parts, candidates, 0.8, noise, together=TOGETHER)
    launches[0].run()
    step = (table[0].double() / 0.8).softmax(-1)
    expected, found = [], []
    codes = (walked.tokens * torch.tensor([K * K, K, 1])).sum(1)
    for a, b, c in itertools.product(range(K), repeat=SLOTS):
        expected.append(float(step[0, 0, a] * step[1, a, b] * step[2, b, c]))
        found.append(int((codes == (a * K + b) * K + c).sum()))
    return {"expected": expected, "found": found}


def ties() -> dict[str, list]:
    flat = torch.zeros(2, 4, 5, 5)
    candidates = torch.randperm(40).view(2, 4, 5)
    scores = torch.zeros(1, 3, 700)
    scores[0, 0, [650, 31, 30]] = 1.0
    head = MarkovHead(torch.zeros(700, 6), torch.zeros(700, 6))
    return {
        "walk": [walk(unit_parts(flat), candidates).tokens.tolist(), candidates[..., 0].tolist()],
        "candidates": [top_candidates(scores, 3)[0, 0].tolist(), [30, 31, 650]],
        "markov": [markov_tokens(scores, torch.tensor([5]), head).tolist(), [[30, 0, 0]]],
        "minus infinity": [
            top_candidates(torch.tensor([[-torch.inf, 2.0, -torch.inf, 3.0]]), 4).tolist(),
            [[3, 1, 0, 2]],
        ],
    }


def extremes() -> dict[str, bool]:
    """Draws at the ends of the unit interval, and candidates of probability 0."""
    scores = torch.tensor([0.0, -1e4, 1.0]).expand(1, 2, 3, 3).contiguous()
    candidates = torch.arange(6).view(1, 2, 3)
    ends = [0.0, 1 - 2**-24, torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)).item()]
    drawn = [walk(unit_parts(scores), candidates, noise=torch.full((1, 2), u)) for u in ends]
    return {
        "never one of weight 0": all(not {1, 4} & set(w.tokens.flatten().tolist()) for w in drawn),
        "lowest and highest": [w.tokens[0].tolist() for w in drawn] == [[0, 3], [2, 5], [2, 5]],
        "usable": usable(scores) and not usable(scores.transpose(2, 3)[..., :2]) and not usable(scores.half()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = {"errors": errors, "distribution": distribution_of_the_walk, "ties": ties, "extremes": extremes}
    print(json.dumps({name: part() for name, part in parts.items()}))
