"""Whatever ends a run, the run that goes on from its files is the run that never ended."""

import random
import signal

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.checkpointing import newest_good
from ppo_lightning.configs import GroupConfig
from ppo_lightning.modules import last_checkpoint
from tests.helpers.cli import changed, tiny_config, write_config
from tests.helpers.deaths import exit_codes
from tests.helpers.runs import data_module, parameters, ppo_module, trainer

KILLED, STOPPED = -signal.SIGKILL, 128 + signal.SIGTERM


def fit(model_dir, folder, final):
    """Three iterations, from the newest file that there is; the weights go to ``final``."""
    pl.seed_everything(0, verbose=False)
    run = trainer(folder, max_epochs=3)
    module = ppo_module(
        model_dir,
        actor=GroupConfig(lr=1e-3, warmup=3, schedule="cosine"),
        critic=GroupConfig(lr=3e-3, schedule="linear"),
    )
    run.fit(module, data_module(val_prompts=["the cat"]), ckpt_path=last_checkpoint(run))
    torch.save(parameters(module), final)


@pytest.fixture(scope="module")
def whole(tiny_llama_dir, tmp_path_factory):
    """Weights of the run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert exit_codes(fit, tiny_llama_dir, folder, folder / "final.pt") == [0]
    return torch.load(folder / "final.pt")


def hit(model_dir, folder, fault):
    """Run, or go on, into a fault: exit status, and what was printed."""
    log = folder / "log.txt"
    log.unlink(missing_ok=True)
    (code,) = exit_codes(fit, model_dir, folder, folder / "early.pt", faults={0: fault}, log=log)
    assert not (folder / "early.pt").exists()
    return code, log.read_text(encoding="utf-8")


def assert_goes_on(model_dir, folder, whole):
    """Go on to the end: the weights are those of the run that nothing interrupted."""
    log = folder / "resumed.txt"
    assert exit_codes(fit, model_dir, folder, folder / "final.pt", log=log) == [0]
    ours = torch.load(folder / "final.pt")
    assert ours.keys() == whole.keys()
    for name, value in whole.items():
        assert ours[name].equal(value), name
    return log.read_text(encoding="utf-8")


def kept(folder):
    """Iterations behind the newest file that can be resumed; and all names."""
    place = folder / "checkpoints"
    names = sorted(path.name for path in place.iterdir()) if place.exists() else []
    return newest_good([place]).iterations, names


# An iteration: 6 tokens and as many to validate, 4 steps, then two files of 879 writes each,
# `epoch=N.ckpt` and `last.ckpt`.
def test_t52_t53_a_run_killed_again_and_again_goes_on_bit_for_bit(tiny_llama_dir, tmp_path, whole):
    """In a rollout, an update, the middle of a file, before and after it has its name."""
    for fault, iterations in [
        ("decode:3", 0),
        ("checkpoint_write:440", 0),
        ("checkpoint_written:1", 0),
        ("checkpoint_renamed:1", 1),
        ("step:3", 1),
        ("checkpoint_renamed:1", 2),
        ("decode:4", 2),
        ("checkpoint_write:1300", 3),
    ]:
        code, _ = hit(tiny_llama_dir, tmp_path, fault)
        assert code == KILLED, fault
        assert kept(tmp_path)[0] == iterations, fault
    assert_goes_on(tiny_llama_dir, tmp_path, whole)


def test_unfinished_files_of_a_killed_run_are_cleared_away(tiny_llama_dir, tmp_path, whole):
    code, _ = hit(tiny_llama_dir, tmp_path, "checkpoint_written:4")
    assert code == KILLED
    unfinished, *names = kept(tmp_path)[1]
    assert names == ["epoch=1.ckpt", "last.ckpt"]
    assert unfinished.startswith(".last.ckpt.")
    assert_goes_on(tiny_llama_dir, tmp_path, whole)
    # Lightning keeps the file that a run was resumed from.
    assert kept(tmp_path)[1] == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]


def test_a_damaged_newest_file_is_skipped_and_said_so(tiny_llama_dir, tmp_path, whole):
    """Cut short, as a disk may leave it: the one before is taken."""
    code, _ = hit(tiny_llama_dir, tmp_path, "checkpoint_renamed:3")
    assert code == KILLED
    newest = tmp_path / "checkpoints/epoch=1.ckpt"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    said = assert_goes_on(tiny_llama_dir, tmp_path, whole)
    assert f"Not resumed from: `{newest}` cannot be read" in said
    assert "last.ckpt`, after 1 iteration." in said


def test_sigterm_ends_a_run_with_143_and_nothing_saved(tiny_llama_dir, tmp_path, whole):
    code, said = hit(tiny_llama_dir, tmp_path, "decode:2:TERM")
    assert (code, kept(tmp_path)) == (STOPPED, (0, []))
    assert "stopped by SIGTERM in iteration 0. No checkpoint was written yet" in said
    code, said = hit(tiny_llama_dir, tmp_path, "step:6:TERM")
    assert (code, kept(tmp_path)) == (STOPPED, (1, ["epoch=0.ckpt", "last.ckpt"]))
    assert "stopped by SIGTERM in iteration 1. `--ckpt_path last` goes on from" in said
    assert f"`{tmp_path / 'checkpoints/last.ckpt'}`" in said
    assert_goes_on(tiny_llama_dir, tmp_path, whole)


def test_sigterm_at_the_very_end_says_that_the_run_is_complete(tiny_llama_dir, tmp_path):
    code, said = hit(tiny_llama_dir, tmp_path, "checkpoint_renamed:6:TERM")
    assert (code, kept(tmp_path)[0]) == (STOPPED, 3)
    assert "the run is complete" in said


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tiny_llama_dir, tmp_path, whole):
    for fault in ("step:6:INT", "checkpoint_write:440:INT"):
        code, _ = hit(tiny_llama_dir, tmp_path, fault)
        assert code == 1  # Lightning's; the command line makes it 130
        assert kept(tmp_path) == (1, ["epoch=0.ckpt", "last.ckpt"])  # no part of a file
    assert_goes_on(tiny_llama_dir, tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_places_drawn_at_random(tiny_llama_dir, tmp_path, whole, seed):
    """Killed anywhere in three iterations, and again within one."""
    draw = random.Random(seed)
    anywhere = [("decode", 30), ("step", 11), ("checkpoint_write", 4300), ("checkpoint_written", 5)]
    soon = [("decode", 6), ("step", 4), ("checkpoint_write", 1700), ("checkpoint_written", 2)]
    for places in (anywhere, soon):
        name, most = draw.choice(places)
        code, _ = hit(tiny_llama_dir, tmp_path, f"{name}:{draw.randint(1, most)}")
        assert code == KILLED
    assert_goes_on(tiny_llama_dir, tmp_path, whole)


# The command line


def command(path, *arguments):
    from ppo_lightning.cli.main import main

    raise SystemExit(main(["fit", "--config", str(path), *arguments]))


def test_the_command_line_finds_the_last_file_of_another_version(tiny_llama_dir, tmp_path):
    """TensorBoard's logger makes a new folder for every run, where Lightning finds nothing."""
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    config = changed(config, "model.init_args.ppo.target_kl", None)  # every step is taken
    path = write_config(tmp_path / "c.yaml", config)
    last, log = ["--ckpt_path", "last"], tmp_path / "log.txt"
    assert exit_codes(command, path, *last, faults={0: "step:3:TERM"}, log=log) == [STOPPED]
    assert "There is no checkpoint to resume from" in log.read_text(encoding="utf-8")
    assert exit_codes(command, path, *last, log=log) == [0]
    first = tmp_path / "run/lightning_logs/version_0/checkpoints/last.ckpt"
    assert f"Resuming from `{first}`, after 1 iteration." in log.read_text(encoding="utf-8")
    assert exit_codes(command, path, "--trainer.default_root_dir", str(tmp_path / "whole")) == [0]
    ours, theirs = (
        torch.load(tmp_path / run / "checkpoints/last.ckpt")
        for run in ("run/lightning_logs/version_1", "whole/lightning_logs/version_0")
    )
    assert (ours["epoch"], ours["global_step"]) == (theirs["epoch"], theirs["global_step"])
    for name, value in theirs["state_dict"].items():
        assert ours["state_dict"][name].equal(value), name
