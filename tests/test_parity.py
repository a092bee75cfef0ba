"""Every engine decodes every kind of draft as the reference does: greedy and sampled, one row and four, in fp32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity import CASES, FAST, TARGETS, decode, differences
from stand_in_graphs import overwriting
from tiny import prompts, tiny_target

from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.engines import ENGINES
from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.fast_gpu import FastGpu
from dspine_probe.decoding.graphs import Capturing
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.errors import UsageError

STARTS: dict[str, Callable[[], Engines]] = {
    "reference": lambda: REFERENCE,
    "cpu": lambda: FastCpu(torch.float32),
    "gpu": FastGpu,
    "gpu, captured": lambda: FastGpu(Capturing(overwriting)),
}


def test_every_engine_of_the_registry_is_here():
    assert {name.split(",")[0] for name in STARTS} == set(ENGINES)


@pytest.fixture(scope="module")
def engines() -> dict[str, Engines]:
    return {name: start() for name, start in STARTS.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STARTS)
def test_an_engine_decodes_as_the_reference_does(engines: dict[str, Engines], name: str, case: str):
    if name == "cpu" and engines[name].kernels is None:
        pytest.skip("no C compiler")
    if name != "reference" and case not in FAST:
        with pytest.raises(UsageError, match="do not compute drafts of the kind .* use the reference engine"):
            differences(case, engines[name])
        return
    assert differences(case, engines[name]) == []


@pytest.mark.parametrize("case", [case for case in CASES if "greedy" in case])
def test_the_reference_writes_what_transformers_writes(case: str):
    target = tiny_target(TARGETS.get(case.split(", ")[0], "llama"), stop_ids=(2, 9, 17))
    for prompt, found in zip(prompts(8), decode(case, REFERENCE), strict=True):
        ids = torch.tensor([prompt])
        written = target.model.generate(
            ids, max_new_tokens=16, do_sample=False, eos_token_id=[2, 9, 17], pad_token_id=0
        )
        assert [*prompt, *found.tokens] == written[0].tolist()


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[int]]:
    """What the kernels gave in Triton's interpreter, which must be asked for before they are imported."""
    pytest.importorskip("triton")
    script = (
        "import json, torch; torch.set_num_threads(1)\n"
        "from dspine_probe.decoding.fast_gpu import FastGpu\n"
        "from parity import FAST, differences\n"
        "engines = FastGpu()\n"
        "assert engines.about['compute'] == 'Triton kernels'\n"
        "print(json.dumps({case: differences(case, engines, small=True) for case in FAST}))\n"
    )
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), str(tests)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize("case", FAST)
def test_interpreted_kernels_decode_as_the_reference_does(interpreted: dict[str, list[int]], case: str):
    assert interpreted[case] == []
