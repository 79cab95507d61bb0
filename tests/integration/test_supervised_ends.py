"""Supervised runs that end early lose nothing that they had done, and owe nothing when resumed."""

import os
import signal

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.checkpointing import newest_good
from ppo_lightning.configs import GroupConfig
from ppo_lightning.metrics import SFTStats, read_step_metrics
from ppo_lightning.modules.run_safety import STEPS_BETWEEN_FILES, KeepLast
from tests.helpers.sft_runs import fit_sft, sft_data, sft_module, weights_of
from tests.helpers.sft_runs import sft_trainer as trainer_of
from tests.integration.test_sft import each_step, equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
]


class Ends(pl.Callback):
    """Counts ends of epochs and validations; may send SIGTERM or fail within a step."""

    def __init__(self, *, sigterm=None, failure=None):
        self.sigterm, self.failure = sigterm, failure
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if module.steps_done + 1 == self.sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        if module.steps_done + 1 == self.failure:
            raise RuntimeError("the power is gone")

    def on_validation_end(self, trainer, module):
        self.seen.append(("validation", module.steps_done))

    def on_train_epoch_end(self, trainer, module):
        stepped = trainer.fit_loop.epoch_loop._batches_that_stepped  # the x axis of some loggers
        self.seen.append(("epoch", module.steps_done, trainer.current_epoch, stepped))


def module(folder):
    return sft_module(folder, actor=GroupConfig(lr=1e-2, warmup=2, schedule="cosine"))


def rows(folder):
    found = read_step_metrics(folder / "metrics.jsonl", SFTStats)
    return [(row.step, row.epoch, row.loss, row.val_loss) for row in found]


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tiny_gpt2_dir, tmp_path_factory):
    """A run of two epochs of three steps that nothing stopped."""
    folder, made, ends = tmp_path_factory.mktemp("whole"), module(tiny_gpt2_dir), Ends()
    fit_sft(folder, made, sft_data(), callbacks=[ends])
    return folder, weights_of(made), ends.seen


@pytest.mark.parametrize("step", [1, 2, 3, 4, 6])
def test_sigterm_leaves_the_step_it_came_in_and_the_run_goes_on_bitwise(
    tiny_gpt2_dir, tmp_path, whole, capsys, step
):
    folder, weights, seen = whole
    stopped = Ends(sigterm=step)
    with pytest.raises(SystemExit) as ended:
        fit_sft(tmp_path, module(tiny_gpt2_dir), sft_data(), callbacks=[stopped])
    assert ended.value.code == 143
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert newest_good([tmp_path]).path == last
    assert newest_good([tmp_path]).steps == step
    assert f"goes on from `{last}`" in capsys.readouterr().err
    again, resumed = module(tiny_gpt2_dir), Ends()
    fit_sft(tmp_path, again, sft_data(), callbacks=[resumed], ckpt=last)
    assert equal(weights_of(again), weights)
    assert rows(tmp_path) == rows(folder)
    assert stopped.seen + resumed.seen == seen
    assert names(tmp_path) == names(folder) == ["epoch=1.ckpt", "last.ckpt"]


def test_sigterm_at_the_last_step_of_max_steps_is_the_end_of_the_run(
    tiny_gpt2_dir, tmp_path, capsys
):
    with pytest.raises(SystemExit) as ended:
        fit_sft(
            *(tmp_path, module(tiny_gpt2_dir), sft_data()),
            **{"callbacks": [Ends(sigterm=4)], "max_steps": 4, "max_epochs": -1},
        )
    assert ended.value.code == 143
    assert "the run is complete" in capsys.readouterr().err


def test_a_user_without_files_gets_none_at_sigterm(tiny_gpt2_dir, tmp_path, capsys):
    options = {"callbacks": [Ends(sigterm=2)], "enable_checkpointing": False}
    with pytest.raises(SystemExit):
        fit_sft(tmp_path, module(tiny_gpt2_dir), sft_data(), **options)
    assert not list(tmp_path.rglob("*.ckpt"))
    assert "No checkpoint was written yet" in capsys.readouterr().err


def test_sigterm_writes_where_the_users_files_are(tiny_gpt2_dir, tmp_path):
    mine = ModelCheckpoint(tmp_path / "mine", monitor="val/loss", filename="best")
    options = {"callbacks": [Ends(sigterm=2), mine]}
    with pytest.raises(SystemExit):
        fit_sft(tmp_path / "run", module(tiny_gpt2_dir), sft_data(), **options)
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["last.ckpt"]
    assert (tmp_path / "mine" / "last.ckpt").is_file()


@pytest.mark.parametrize(
    ("trainer", "data"),
    [
        ({}, {}),
        ({"val_check_interval": 2}, {}),
        ({"check_val_every_n_epoch": 2}, {}),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4}, {}),
        ({"limit_val_batches": 0}, {}),
        ({}, {"val_demonstrations": None}),
    ],
    ids=["each epoch", "inside", "every second", "across", "off", "nothing held out"],
)
def test_a_file_of_any_step_owes_its_validation_and_the_end_of_its_epoch(
    tiny_gpt2_dir, tmp_path, trainer, data
):
    first = Ends()
    saving = {"callbacks": [first, each_step(tmp_path / "ckpt")], **trainer}
    fit_sft(tmp_path / "a", module(tiny_gpt2_dir), sft_data(**data), **saving)
    for done in range(1, 7):
        second, again = Ends(), module(tiny_gpt2_dir)
        saving = {"callbacks": [second, each_step(tmp_path / f"more{done}")], **trainer}
        file = tmp_path / "ckpt" / f"step={done}.ckpt"
        fit_sft(tmp_path / f"b{done}", again, sft_data(**data), ckpt=file, **saving)
        assert second.seen == [end for end in first.seen if end[1] >= done], done
        one, other = (
            [row for row in rows(tmp_path / run) if row[0] > done - (row[3] is not None)]
            for run in ("a", f"b{done}")
        )
        assert one == other, done


def test_files_of_validations_and_epochs_owe_nothing(tiny_gpt2_dir, tmp_path):
    """Those of a monitored metric are written after the validation."""

    def run(name, ends, **options):
        best = ModelCheckpoint(tmp_path / name, "{epoch}", monitor="val/loss", save_top_k=-1)
        best._save_on_train_epoch_end = False
        options["callbacks"] = [ends, best]
        fit_sft(tmp_path / "run", module(tiny_gpt2_dir), sft_data(), **options)

    run("first", first := Ends())
    run("second", second := Ends(), ckpt=tmp_path / "first" / "epoch=0.ckpt")
    assert second.seen == first.seen[1:]


def test_the_last_file_is_written_anew_within_an_epoch(tiny_gpt2_dir, tmp_path):
    options = {"callbacks": [Ends(failure=3), KeepLast(2)]}
    with pytest.raises(RuntimeError, match="the power is gone"):
        fit_sft(tmp_path, module(tiny_gpt2_dir), sft_data(), **options)
    assert names(tmp_path) == ["last.ckpt"]
    assert newest_good([tmp_path]).steps == 2
    last = tmp_path / "checkpoints" / "last.ckpt"
    again = module(tiny_gpt2_dir)
    fit_sft(tmp_path, again, sft_data(), ckpt=last, callbacks=[KeepLast(2)])
    assert names(tmp_path) == ["epoch=1.ckpt", "last.ckpt"]
    assert newest_good([tmp_path]).steps == 6


def test_every_supervised_run_has_such_a_file(tiny_gpt2_dir, tmp_path):
    trainer = trainer_of(tmp_path, max_epochs=1)
    trainer.fit(module(tiny_gpt2_dir), sft_data())
    (callback,) = trainer.checkpoint_callbacks
    assert type(callback) is KeepLast
    assert callback.every_n_steps == STEPS_BETWEEN_FILES
    trial = trainer_of(tmp_path / "trial", fast_dev_run=True)
    trial.fit(module(tiny_gpt2_dir), sft_data())
    assert not list((tmp_path / "trial").rglob("*.ckpt"))


def test_a_resumed_run_without_validations_owes_none(tiny_gpt2_dir, tmp_path):
    saving = {"callbacks": [each_step(tmp_path / "ckpt")], "val_check_interval": 2}
    fit_sft(tmp_path / "a", module(tiny_gpt2_dir), sft_data(), **saving, max_epochs=1)
    for done in (2, 3):
        options = {"callbacks": [ends := Ends(), each_step(tmp_path / "more")], "max_epochs": 1}
        file = tmp_path / "ckpt" / f"step={done}.ckpt"
        made = module(tiny_gpt2_dir)
        fit_sft(tmp_path / "b", made, sft_data(), ckpt=file, limit_val_batches=0, **options)
        assert ends.seen == [("epoch", 3, 0, 3)]
