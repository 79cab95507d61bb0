"""Faults that people have met, as small replacements in the code, for ``tests/mutate.py``.

Numbers are those of ``docs/traps.md``. A replacement must fit the code in exactly one place, run
without an error of its own, and turn one of its tests red.
"""

from tests.helpers.mutations import (
    ages,
    chain,
    data,
    devices,
    doctor,
    estimate,
    http,
    monitors,
    normalising,
    packing,
    reporting,
    reward_model,
    rewards,
    sampling,
    scale,
    sft,
    shaping,
    shared_gradients,
    sweeps,
    temperature,
    training,
    vllm,
    watchdog,
    zero,
)
from tests.helpers.mutations.base import Mutation, misfit

MUTATIONS = (
    *sampling.MUTATIONS,
    *shaping.MUTATIONS,
    *normalising.MUTATIONS,
    *training.MUTATIONS,
    *data.MUTATIONS,
    *devices.MUTATIONS,
    *estimate.MUTATIONS,
    *rewards.MUTATIONS,
    *http.MUTATIONS,
    *sft.MUTATIONS,
    *reward_model.MUTATIONS,
    *chain.MUTATIONS,
    *vllm.MUTATIONS,
    *zero.MUTATIONS,
    *packing.MUTATIONS,
    *scale.MUTATIONS,
    *watchdog.MUTATIONS,
    *shared_gradients.MUTATIONS,
    *ages.MUTATIONS,
    *monitors.MUTATIONS,
    *reporting.MUTATIONS,
    *doctor.MUTATIONS,
    *sweeps.MUTATIONS,
    *temperature.MUTATIONS,
)

__all__ = ["MUTATIONS", "Mutation", "misfit"]
