"""Two real processes (gloo, spawned): they train what one would, one of them writes, and a fault of one stops both."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from test_intermediate import tiny_store
from test_training import CONFIG
from tiny import tiny_target
from toy import toy_draft, toy_store

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.training import run, trainer
from dspine_probe.training.objectives.dflash import DFlashObjective
from dspine_probe.training.records import METRICS, VALIDATION, read_rows
from dspine_probe.training.run import DraftPlan, train_draft
from dspine_probe.training.state import locked
from dspine_probe.training.trainer import train

PROCESSES, SECONDS = 2, 240
KINDS = ("dflash", "dspine")
SHARED = dataclasses.replace(CONFIG, blocks=96, save_every=4)


class Broken(DFlashObjective):
    """Its loss is not a number on process 1 from step 2 on."""

    def forward(self, batch, progress):  # type: ignore[no-untyped-def]
        outcome = super().forward(batch, progress)
        bad = os.environ["RANK"] == "1" and progress.step == 2
        return dataclasses.replace(outcome, loss=outcome.loss * torch.nan) if bad else outcome


def child(rank: int, port: int, folder: Path) -> None:
    """What each process does; what it found goes to `found-RANK.pt`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    found: dict[str, Any] = {"validated": 0, "saved": 0}

    def counted(name: str, real: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            found[name] += 1
            return real(*given, **more)

        return call

    trainer.validate = run.validate = counted("validated", trainer.validate)  # type: ignore[attr-defined]
    run.save_draft = counted("saved", run.save_draft)  # type: ignore[attr-defined]
    for kind in KINDS:
        draft = toy_draft(kind)
        train(draft, toy_store(), SHARED, folder / kind, held_out=[0])
        found[kind] = draft.state_dict()
    found["trained"] = dict(found)
    plan = DraftPlan("dflash", 2, 5, 40, mask_token_id=63)
    budget = dataclasses.replace(SHARED, blocks=24)
    train_draft(plan, tiny_target(), tiny_store(), budget, folder / "made.run", folder / "made")
    draft = toy_draft("dflash")
    try:
        train(draft, toy_store(), SHARED, folder / "nan", objective=Broken(draft))
    except ProbeError as fault:
        found["nan"], found["after nan"] = str(fault), draft.state_dict()
    try:
        if rank == 0:
            (folder / "busy").mkdir()
            with locked(folder / "busy"):
                train(toy_draft("dflash"), toy_store(), SHARED, folder / "busy")
        else:
            train(toy_draft("dflash"), toy_store(), SHARED, folder / "busy")
    except (UsageError, ProbeError) as fault:
        found["busy"] = str(fault)
    torch.save(found, folder / f"found-{rank}.pt")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("pair")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=child, args=(rank, port, folder)) for rank in range(PROCESSES)]
    for one in children:
        one.start()
    for one in children:
        one.join(SECONDS)
        if one.is_alive():
            one.kill()
    assert [one.exitcode for one in children] == [0, 0], "a process failed, or waits for the other"
    return folder, [torch.load(folder / f"found-{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_what_one_would(kind: str, pair: Any, tmp_path: Path) -> None:
    """The same micro-batches with the same draws, summed in another order."""
    folder, found = pair
    alone = toy_draft(kind)
    train(alone, toy_store(), dataclasses.replace(SHARED, accumulate=PROCESSES), tmp_path, held_out=[0])
    for name, value in alone.state_dict().items():
        assert torch.equal(found[0][kind][name], found[1][kind][name]), name
        torch.testing.assert_close(found[0][kind][name], value, atol=2e-4, rtol=1e-3)
    ours, theirs = read_rows(folder / kind / METRICS), read_rows(tmp_path / METRICS)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list("12345678")
    for row, other in zip(ours, theirs, strict=True):
        assert row["blocks"] == other["blocks"]
        assert float(row["cross_entropy"]) == pytest.approx(float(other["cross_entropy"]), rel=1e-3)


def test_one_process_validates_and_writes(pair: Any) -> None:
    folder, found = pair
    assert [row["step"] for row in read_rows(folder / "dflash" / VALIDATION)] == ["4", "8"]
    assert [found[0][name] for name in ("validated", "saved")] == [2 * len(KINDS) + 2, 1]
    assert [found[1][name] for name in ("validated", "saved")] == [0, 0]
    assert (folder / "made" / "model.safetensors").is_file()


def test_a_loss_that_is_no_number_stops_every_process_before_the_step(pair: Any, tmp_path: Path) -> None:
    _, found = pair
    assert found[0]["nan"] == found[1]["nan"]
    assert "at step 2, which was not taken" in found[0]["nan"]
    good = toy_draft("dflash")
    train(good, toy_store(), dataclasses.replace(SHARED, accumulate=PROCESSES), tmp_path, stop_after=2)
    for state in (found[0]["after nan"], found[1]["after nan"]):
        for name, value in good.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=2e-4, rtol=1e-3)


def test_what_the_main_process_is_refused_stops_the_other_too(pair: Any) -> None:
    _, found = pair
    assert "is in use by process" in found[0]["busy"]
    assert "another process of this run was refused" in found[1]["busy"]
