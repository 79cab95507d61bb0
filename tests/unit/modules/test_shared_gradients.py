"""Where gradients are averaged in shared memory, and where DDP is left alone."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from ppo_lightning.modules import FSDP2Strategy, shared_gradients
from ppo_lightning.modules.shared_gradients import SharedGradients

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Subclass(DDPStrategy):
    """Lightning's DeepSpeedStrategy is one."""


def asked(monkeypatch, strategy, *, enabled=True, ranks=2, device=CPU, hooks=()):
    """Whether DDP is asked to average in shared memory."""
    models = []
    monkeypatch.setattr(shared_gradients, "average_in_shared_memory", lambda m: models.append(m))
    monkeypatch.setattr(shared_gradients, "is_distributed", lambda: ranks > 1)
    monkeypatch.setattr(type(strategy), "root_device", device)
    strategy._model = SimpleNamespace(_comm_hooks=list(hooks))
    SharedGradients(enabled).on_train_start(SimpleNamespace(strategy=strategy), None)
    return bool(models)


def hook_of_the_user(state, bucket):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        (DDPStrategy, {}, True),
        (DDPStrategy, {"enabled": False}, False),
        (DDPStrategy, {"ranks": 1}, False),
        (DDPStrategy, {"device": CUDA}, False),
        (DDPStrategy, {"hooks": [(hook_of_the_user, None)]}, False),
        (lambda: DDPStrategy(ddp_comm_hook=hook_of_the_user), {}, False),
        (Subclass, {}, False),
        (FSDP2Strategy, {}, False),
        (lambda: SingleDeviceStrategy(device=CPU), {}, False),
    ],
)
def test_ddp_on_cpus_is_asked_unless_the_user_says_otherwise(
    monkeypatch, strategy, options, expected
):
    assert asked(monkeypatch, strategy(), **options) is expected
