"""Whether weights are kept in few bits."""

from torch import nn

from ppo_lightning.models.precision import QuantisedLinear


def is_quantised(model: nn.Module) -> bool:
    return any(isinstance(part, QuantisedLinear) for part in model.modules())
