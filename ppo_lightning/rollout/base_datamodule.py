"""What the data modules of a fit share."""

from ppo_lightning.data.steps.base_datamodule import ValidationSwitch

__all__ = ["ValidationSwitch"]
