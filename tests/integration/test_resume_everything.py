"""With every mechanism on: a run killed again and again is the run that was never killed."""

import random
import signal

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.modules import last_checkpoint
from tests.helpers.deaths import exit_codes
from tests.helpers.everything import (
    ITERATIONS,
    data_with_everything,
    every_callback,
    module_with_everything,
    save_state,
)
from tests.helpers.faults import same
from tests.helpers.runs import trainer

KILLED = -signal.SIGKILL


def fit(model_dir, folder, final):
    """All iterations, from the newest file that there is."""
    pl.seed_everything(0, verbose=False)
    run = trainer(folder, max_epochs=ITERATIONS, callbacks=every_callback())
    module = module_with_everything(model_dir)
    run.fit(module, data_with_everything(), ckpt_path=last_checkpoint(run))
    save_state(run, module, final)


@pytest.fixture(scope="module")
def whole(tiny_llama_dir, tmp_path_factory):
    """What the run leaves that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    log = folder / "log.txt"
    codes = exit_codes(fit, tiny_llama_dir, folder, folder / "final.pt", log=log)
    assert codes == [0], log.read_text(encoding="utf-8")
    return torch.load(folder / "final.pt")


def assert_same_after(faults, model_dir, folder, whole):
    """Run into one fault after another, then to the end."""
    for fault in faults:
        codes = exit_codes(fit, model_dir, folder, folder / "early.pt", faults={0: fault})
        assert codes == [KILLED], fault
    log = folder / "resumed.txt"
    codes = exit_codes(fit, model_dir, folder, folder / "final.pt", log=log)
    assert codes == [0], log.read_text(encoding="utf-8")
    found = torch.load(folder / "final.pt")
    for part, value in whole.items():
        assert same(found[part], value), part


def test_every_mechanism_had_something_to_do(whole):
    sources = {entry["source"] for entry in whole["controls"]["journal"]}
    assert sources >= {"AdaptiveKL", "EntropyTarget", "CheckpointRollback", "ValueWarmup"}
    assert whole["callbacks"]["CheckpointRollback"]["num_rollbacks"] == 1
    assert whole["rewards"]["normalizer"]["count"] > 0
    assert 0 < whole["rewards"]["multipliers"]["length"]["gathered"] < 10


@pytest.mark.parametrize(
    "faults",
    [
        ["decode:3", "step:8", "checkpoint_renamed:1", "checkpoint_renamed:1"],
        ["checkpoint_renamed:8", "checkpoint_renamed:2", "decode:9"],  # around the rollback
        ["checkpoint_written:9", "checkpoint_write:1500", "step:5"],
    ],
    ids=["early", "around the rollback", "late"],
)
def test_t52_t53_killed_runs_go_on_bit_for_bit(tiny_llama_dir, tmp_path, whole, faults):
    assert_same_after(faults, tiny_llama_dir, tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_places_drawn_at_random(tiny_llama_dir, tmp_path, whole, seed):
    draw = random.Random(seed)
    places = [("decode", 40), ("step", 20), ("checkpoint_write", 5000), ("checkpoint_written", 8)]
    name, most = draw.choice(places)
    faults = [f"{name}:{draw.randint(1, most)}", f"decode:{draw.randint(1, 6)}"]
    assert_same_after(faults, tiny_llama_dir, tmp_path, whole)
