"""Where checkpoints are looked for, and how Lightning is made to write them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from ppo_lightning.errors import CheckpointError
from ppo_lightning.modules.checkpoint_files import (
    CheckpointFiles,
    checkpoint_folders,
    last_checkpoint,
    use_checkpoint_files,
)


def stand_in(folder, *, loggers=(), callbacks=()):
    return SimpleNamespace(
        checkpoint_callbacks=list(callbacks), loggers=list(loggers), default_root_dir=str(folder)
    )


@pytest.mark.parametrize("logger", [TensorBoardLogger, CSVLogger])
def test_all_versions_unless_one_was_chosen(tmp_path, logger):
    free = stand_in(tmp_path, loggers=[logger(tmp_path / "runs", name="film")])
    assert checkpoint_folders(free) == [tmp_path / "runs/film"]
    for version, name in (("a", "a"), (3, "version_3")):
        chosen = logger(tmp_path / "runs", name="film", version=version)
        assert checkpoint_folders(stand_in(tmp_path, loggers=[chosen])) == [
            tmp_path / "runs/film" / name
        ]


def test_a_version_that_slurm_gave_is_not_a_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    logger = TensorBoardLogger(tmp_path, version=77)  # what the Trainer's default is under SLURM
    assert checkpoint_folders(stand_in(tmp_path, loggers=[logger])) == [tmp_path / "lightning_logs"]


def test_a_folder_of_its_own_or_none_of_a_logger(tmp_path):
    own = ModelCheckpoint(dirpath=tmp_path / "mine")
    logger = TensorBoardLogger(tmp_path)
    found = checkpoint_folders(stand_in(tmp_path, loggers=[logger], callbacks=[own]))
    assert found == [tmp_path / "mine"]
    assert checkpoint_folders(stand_in(tmp_path)) == [tmp_path / "checkpoints"]


def test_nothing_found_is_said_with_the_place(tmp_path, capsys):
    assert last_checkpoint(stand_in(tmp_path)) is None
    place = f"`{tmp_path / 'checkpoints'}`"
    assert f"no checkpoint to resume from in {place}: the run starts anew." in (
        capsys.readouterr().err
    )
    assert last_checkpoint(stand_in(tmp_path), trains=False) is None
    assert capsys.readouterr().err == f"There is no checkpoint in {place}.\n"


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, DDPStrategy])
def test_lightnings_own_files_are_replaced_and_a_users_plugin_is_not(strategy):
    class Own(TorchCheckpointIO):
        pass

    plain, chosen, own = strategy(), strategy(), Own()
    chosen.checkpoint_io = own
    for trainer in (SimpleNamespace(strategy=s) for s in (plain, chosen)):
        use_checkpoint_files(trainer)
        use_checkpoint_files(trainer)  # a second `fit` with the same trainer
    assert isinstance(plain.checkpoint_io, CheckpointFiles)
    assert chosen.checkpoint_io is own
    assert not hasattr(plain.save_checkpoint.write, "write")


def test_a_damaged_file_is_named_with_the_way_out(tmp_path):
    file = tmp_path / "a.ckpt"
    torch.save({"w": torch.arange(100.0)}, file)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"a\.ckpt` cannot be read.*--ckpt_path last"):
        CheckpointFiles().load_checkpoint(file)
    with pytest.raises(FileNotFoundError):
        CheckpointFiles().load_checkpoint(Path("not-there.ckpt"))
