"""What an update changes, taken out of a module and put back in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from ppo_lightning.checkpointing import copied
from ppo_lightning.checkpointing.entry import frozen_names
from ppo_lightning.distributed import local, mapped
from ppo_lightning.errors import CheckpointError
from ppo_lightning.modules.placing import states_placed


def capture(module: Any) -> dict[str, Any]:
    """Return what training has changed in a ``PPOModule``, as plain containers.

    Trained weights and buffers, optimiser, place in the learning rates' schedules, moments of the
    reward's normalisation, steps skipped in a row, and the state of callbacks that go back with
    them (``goes_back = True``, such as an average of the weights). Not the iteration, the order of
    the prompts, the controls and their journal, nor the trainer's counters: they go on.

    Args:
        module: Attached to a trainer that fits.

    Returns:
        Tensors are the module's own, not copies: see ``copied``. Of what lies in shards they are
        this rank's parts.
    """
    frozen = frozen_names(module)
    state = {
        "weights": {k: v for k, v in module.state_dict().items() if k not in frozen},
        "optimizer": _optimizer(module).state_dict(),
        "scheduler": module.lr_schedulers().state_dict(),
        "rewards": module.reward_pipeline.state_dict(),
        "skipped_in_a_row": module.skips.in_a_row,
        "rested": dict(module.rested),
        "callbacks": {c.state_key: c.state_dict() for c in _going_back(module)},
    }
    taken: dict[str, Any] = mapped(state, local)
    return taken


@torch.no_grad()
def restore(module: Any, state: Mapping[str, Any]) -> None:
    """Put a state back, bitwise, into the same parameters.

    Weights are copied in place, so that the optimiser, buckets of DDP and whatever else holds a
    parameter go on holding it. Learning rates are set anew at the next update, from the schedule's
    place and the factors in force, so that a rate that was cut stays cut.

    Args:
        module: Attached to a trainer that fits.
        state: Of ``capture``. It is copied from and stays as it is.

    Raises:
        CheckpointError: The state is of other networks.
    """
    _require_same(module, state["weights"])
    own = module.state_dict()
    for name, weight in state["weights"].items():
        local(own[name]).copy_(weight)
    # A copy: the optimiser would go on with the very tensors it is given, and change the snapshot.
    optimizer = _optimizer(module)
    optimizer.load_state_dict(states_placed(copied(state["optimizer"]), optimizer))
    module.lr_schedulers().load_state_dict(copied(state["scheduler"]))
    module.reward_pipeline.load_state_dict(state["rewards"])
    module.skips.in_a_row = int(state["skipped_in_a_row"])
    module.rested = dict(state["rested"])
    for callback in _going_back(module):
        if (own := state["callbacks"].get(callback.state_key)) is not None:
            callback.load_state_dict(move_data_to_device(copied(own), module.device))
            getattr(callback, "after_going_back", lambda module: None)(module)
    module.went_back = True


def all_finite(state: Mapping[str, Any]) -> bool:
    """Whether every number of the weights and of the optimiser's moments is finite."""
    moments = state["optimizer"]["state"].values()
    return _finite([*state["weights"].values(), *(v for entry in moments for v in entry.values())])


def finite_weights(module: Any) -> bool:
    """Whether every trained weight is finite."""
    return _finite(local(p.detach()) for p in module.parameters() if p.requires_grad)


def _finite(values: Iterable[Any]) -> bool:
    floating = (t for t in values if isinstance(t, Tensor) and t.is_floating_point())
    return all(bool(t.isfinite().all()) for t in floating)


def _going_back(module: Any) -> list[Any]:
    return [c for c in module.trainer.callbacks if getattr(c, "goes_back", False)]


def _optimizer(module: Any) -> Any:
    return module.optimizers(use_pl_optimizer=False)


def _require_same(module: Any, weights: Mapping[str, Tensor]) -> None:
    frozen = frozen_names(module)
    shapes = {k: local(v).shape for k, v in module.state_dict().items() if k not in frozen}
    other = {k: v.shape for k, v in weights.items()}
    if shapes != other:
        names = sorted(k for k in shapes.keys() | other.keys() if shapes.get(k) != other.get(k))
        raise CheckpointError(
            f"The snapshot is of other networks: `{names[0]}` is missing or of another shape "
            f"({len(names)} such weights). Remove it, and resume from a checkpoint."
        )
