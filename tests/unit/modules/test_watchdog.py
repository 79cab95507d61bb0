"""When a run is watched, and which errors are another rank's."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from ppo_lightning.callbacks import Watchdog
from ppo_lightning.errors import CheckpointError, RankError
from ppo_lightning.modules.run_safety import run_callbacks
from ppo_lightning.modules.watchdog import is_broken_collective
from tests.helpers.runs import trainer


@pytest.mark.parametrize(("ranks", "given", "count"), [(1, 0, 0), (2, 0, 1), (2, 1, 0), (1, 1, 0)])
def test_runs_on_several_ranks_are_watched_unless_the_user_says_how(
    tmp_path, monkeypatch, ranks, given, count
):
    monkeypatch.setattr(pl.Trainer, "world_size", ranks)
    own = [Watchdog(timeout=None)] * given
    run = trainer(tmp_path, callbacks=list(own))
    assert sum(isinstance(c, Watchdog) for c in run_callbacks(run)) == count
    assert [c for c in run.callbacks if isinstance(c, Watchdog)] == own


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"),
            True,
        ),
        (RuntimeError("[1]: Timed out waiting 1800000ms for recv: gloo"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("shape '[2, 3]' is invalid"), False),
        (CheckpointError("on another rank, which says why (gloo)"), False),
        (ValueError("gloo"), False),
    ],
)
def test_a_broken_collective_is_known_by_its_error(error, broken):
    assert is_broken_collective(error) is broken


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0.0}, "`interval` must be above 0, got 0.0"),
        ({"timeout": 1.0, "interval": 1.0}, r"`timeout` must be at least two times `interval`"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Watchdog(**settings)


def test_one_process_is_not_watched_and_an_error_stays_as_it_is():
    dog, run = Watchdog(timeout=None), SimpleNamespace()
    dog.setup(run, None, "fit")
    dog.on_exception(run, None, RuntimeError("gloo"))
    dog.teardown(run, None, "fit")
    assert vars(run) == {}
    assert issubclass(RankError, RuntimeError)
