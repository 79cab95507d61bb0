"""The one place for what changes while a run goes on.

Configs are frozen. Whoever wants a coefficient changed *requests* it here; one pure function merges
the requests, and a journal tells who changed what and when.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

from ppo_lightning.configs import KLConfig, PPOConfig, SamplingConfig
from ppo_lightning.configs.ppo import CLIP_RANGES, PENALTY_COEFS
from ppo_lightning.errors import ConfigError, unknown_key_message

Layer = Literal["controller", "doctor", "safety"]
PROMPT_FACTORS = (0.25, 16.0)
"""Bounds of the factor on a buffer's prompts."""
TEMPERATURE_FACTORS = (0.5, 2.0)
"""Bounds of the temperature, as factors on the configured one."""

_LAYERS: tuple[Layer, ...] = ("controller", "doctor", "safety")  # applied in this order


@dataclass(frozen=True, kw_only=True)
class Dial:
    """A number that may change during a run.

    Args:
        value: As configured.
        low: Least value that any request can reach.
        high: Largest value that any request can reach.
    """

    value: float
    low: float = 0.0
    high: float = inf


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one source asks of one dial; a later request of the same source replaces it.

    Args:
        source: Who asks, such as ``AdaptiveKL``.
        dial: Name of the dial.
        value: Wanted value; or
        factor: factor on what the layers before made of it.
        layer: ``controller`` first, then ``doctor``, then ``safety``: a later layer has the
            last word.
        until: Last iteration that it holds for; None holds for good.
        reason: For the journal.
    """

    source: str
    dial: str
    value: float | None = None
    factor: float | None = None
    layer: Layer = "controller"
    until: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) == (self.factor is None):
            raise ConfigError(f"A request for `{self.dial}` takes either `value` or `factor`.")


def merged_value(dial: Dial, requests: Sequence[Request], *, iteration: int) -> float:
    """Value of a dial after all requests that hold, within its bounds.

    Args:
        dial: Configured value and bounds.
        requests: Those for this dial, in the order they were made.
        iteration: Current iteration.
    """
    value = dial.value
    for layer in _LAYERS:
        for request in requests:
            expired = request.until is not None and iteration > request.until
            if request.layer != layer or expired:
                continue
            value = request.value if request.value is not None else value * (request.factor or 0.0)
    return min(max(value, dial.low), dial.high)


class Controls:
    """Dials, the requests that turn them, and the journal.

    Args:
        dials: Name to configured value and bounds.
    """

    def __init__(self, dials: Mapping[str, Dial]) -> None:
        self._dials = dict(dials)
        self._requests: dict[tuple[str, str], Request] = {}
        self._laws: dict[str, str] = {}
        self._former_laws: dict[str, str] = {}
        self.iteration = 0
        self.journal: list[dict[str, Any]] = []

    def __getitem__(self, dial: str) -> float:
        self._known(dial)
        requests = [request for request in self._requests.values() if request.dial == dial]
        return merged_value(self._dials[dial], requests, iteration=self.iteration)

    def wanted(self, source: str, dial: str) -> float:
        """Return what a law made of a dial, before later layers had their word.

        A law goes on from this; from the value in force it would take their factors in again.
        """
        self._known(dial)
        own = self._requests.get((source, dial))
        return self._dials[dial].value if own is None or own.value is None else own.value

    def claim(self, dial: str, source: str) -> None:
        """Register the law that steers a dial.

        Raises:
            ConfigError: Another law steers it already, or no such dial exists.
        """
        self._known(dial)
        owner = self._laws.setdefault(dial, source)
        if owner != source:
            raise ConfigError(
                f"`{dial}` is steered by both {owner} and {source}: keep one of them."
            )

    def request(self, request: Request) -> float:
        """Make or replace a request; the change is written to the journal.

        Returns:
            Value in force afterwards.
        """
        if math.isnan(request.value or 0.0) or math.isnan(request.factor or 0.0):
            raise ConfigError(f"{request.source} asks for a `{request.dial}` that is not a number.")
        before = self[request.dial]
        key = request.source, request.dial
        if self._requests.get(key) != request:
            self._requests.pop(key, None)  # the last made stands last
            self._requests[key] = request
        return self._journalled(request.dial, request.source, before, request.reason)

    def withdraw(self, source: str, dial: str) -> float:
        """Take a request back; without one nothing happens."""
        before = self[dial]
        self._requests.pop((source, dial), None)
        return self._journalled(dial, source, before, "withdrawn")

    def note(
        self,
        source: str,
        what: str,
        *,
        before: float | None = None,
        after: float | None = None,
        reason: str,
    ) -> None:
        """Write down a change of something that is no dial, such as weights.

        Args:
            source: Who changed it.
            what: Its name, in the place of a dial's.
            before: A number that tells what it was, if there is one.
            after: The same of what it is now.
            reason: Why, or how.
        """
        entry = {"iteration": self.iteration, "source": source, "dial": what}
        self.journal.append({**entry, "before": before, "after": after, "reason": reason})

    def _journalled(self, dial: str, source: str, before: float, reason: str) -> float:
        after = self[dial]
        if after != before:
            self.note(source, dial, before=before, after=after, reason=reason)
        return after

    def _known(self, dial: str) -> None:
        if dial not in self._dials:
            raise ConfigError(unknown_key_message(dial, self._dials, "the run's controls"))

    def state_dict(self) -> dict[str, Any]:
        """Requests and journal as plain containers."""
        requests = [asdict(request) for request in self._requests.values()]
        return {
            "requests": requests,
            "laws": dict(self._laws),
            "journal": list(self.journal),
            "iteration": self.iteration,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore requests and journal; configured values stay those of the running config."""
        requests = [Request(**request) for request in state["requests"]]
        self._requests = {(request.source, request.dial): request for request in requests}
        self.journal = list(state["journal"])
        self.iteration = int(state["iteration"])
        self._former_laws = dict(state["laws"])

    def drop_unclaimed(self) -> None:
        """Withdraw what laws of the resumed run asked for that this run does not have."""
        for dial, source in self._former_laws.items():
            if self._laws.get(dial) != source:
                self.withdraw(source, dial)
        self._former_laws = {}

    def asked_by(self, source: str) -> list[str]:
        """Return the dials that a source has a request for which holds for good."""
        own = (request for request in self._requests.values() if request.source == source)
        return [request.dial for request in own if request.until is None]

    def left_over(self, present: Collection[str]) -> list[str]:
        """Say which dials stay turned although who turned them is not there any more.

        A law's own are withdrawn by ``drop_unclaimed``; these are those of later layers, which
        nobody would turn back.

        Args:
            present: Sources that may still turn theirs back.

        Returns:
            A line for each source that is missing.
        """
        held = [r for r in self._requests.values() if r.layer != "controller"]
        held = [r for r in held if r.until is None or r.until > self.iteration]
        missing = dict.fromkeys(r.source for r in held if r.source not in present)
        return [_left_over(s, self._turned(r.dial for r in held if r.source == s)) for s in missing]

    def _turned(self, dials: Iterable[str]) -> str:
        changes = ((dial, self._dials[dial].value, self[dial]) for dial in dials)
        return ", ".join(f"`{dial}` {before:.3g} → {now:.3g}" for dial, before, now in changes)


def _left_over(source: str, turned: str) -> str:
    doctor = "add the callback Doctor with `policy: observe`, or " if source == "Doctor" else ""
    return (
        f"This run goes on with what {source} turned before: {turned} (configured → in force). "
        f"There is no {source} here that would turn it back. To do so {doctor}call "
        f'`module.controls.withdraw("{source}", DIAL)` in a callback\'s `on_train_start`.'
    )


def ppo_dials(
    ppo: PPOConfig,
    kl: KLConfig,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 (frozen)
    *,
    temperatures: tuple[float, float] = (0.0, inf),
) -> dict[str, Dial]:
    """Numbers that may change during a run, with their bounds.

    Args:
        ppo: Objective and update epochs.
        kl: Penalty towards the reference.
        sampling: The configured temperature.
        temperatures: Between which the engine can sample; see ``RolloutEngine.temperatures``.
    """
    return {
        "kl_coef": Dial(value=kl.coef),
        "clip_range": Dial(value=ppo.clip_range, low=CLIP_RANGES[0], high=CLIP_RANGES[1]),
        "ent_coef": Dial(value=ppo.ent_coef),
        "penalty_coef": Dial(value=ppo.penalty_coef, low=PENALTY_COEFS[0], high=PENALTY_COEFS[1]),
        "actor_lr_factor": Dial(value=1.0),
        "critic_lr_factor": Dial(value=1.0),
        "num_update_epochs": Dial(value=ppo.num_update_epochs, low=1, high=ppo.num_update_epochs),
        "train_actor": Dial(value=1.0, high=1.0),
        "num_prompts_factor": Dial(value=1.0, low=PROMPT_FACTORS[0], high=PROMPT_FACTORS[1]),
        "max_kl_ref": Dial(value=kl.max_kl_ref or inf),
        "max_kl_ref_per_token": Dial(value=kl.max_kl_ref_per_token or inf),
        "temperature": _temperature_dial(float(sampling.temperature), *temperatures),
    }


def _temperature_dial(configured: float, least: float, largest: float) -> Dial:
    """Keep within the factors and within what the engine can do, but never off the config."""
    low, high = (factor * configured for factor in TEMPERATURE_FACTORS)
    return Dial(
        value=configured,
        low=max(low, min(least, configured)),
        high=min(high, max(largest, configured)),
    )
