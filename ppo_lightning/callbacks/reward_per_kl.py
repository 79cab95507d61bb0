"""β from what the KL to the reference pays."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import override

from ppo_lightning.callbacks.controller import Controller, check_kl_coef, measured, require_bounds
from ppo_lightning.configs.checks import require, require_at_least, require_positive, require_within
from ppo_lightning.errors import ConfigError
from ppo_lightning.functional import WindowTrend, payoff_of_kl, window_trend
from ppo_lightning.metrics import IterationStats


class RewardPerKL(Controller):
    """Brake where the reward gained per nat of KL fades, and change course where there was none.

    Straight lines are fitted to mean score and KL(policy‖reference) of the last iterations, once
    the KL has grown by ``min_kl_growth`` over them:

    - the score rose by ``min_gain`` of its spread: the slope of score over KL is remembered if it
      is the best so far;
    - the slope has fallen below ``slope_share`` of the best: β is multiplied by ``factor``;
    - no window has ever paid: β, or the actor's learning rate, is divided by ``factor``.

    The score must keep its scale, so ``reward_processing.normalize`` may be ``none`` or
    ``reference``.

    Args:
        window: Iterations that are looked at.
        factor: Of one change.
        slope_share: Share of the best slope below which the KL no longer pays.
        min_kl_growth: Least growth of the KL over the window, in nats per response.
        min_gain: Least gain over the window that counts, as a share of the scores' spread.
        on_stall: What is lowered where KL grows without reward.
        min_coef: Least β.
        max_coef: Largest β.
        min_lr_factor: Least factor on the actor's learning rate.
        cooldown: Iterations after a change without another; None takes ``window``, so that no
            iteration from before the last change is looked at.
    """

    goes_back = True  # a window of iterations that were undone would say nothing of the run

    def __init__(
        self,
        *,
        window: int = 5,
        factor: float = 1.5,
        slope_share: float = 0.5,
        min_kl_growth: float = 0.5,
        min_gain: float = 0.15,
        on_stall: Literal["lower_coef", "lower_actor_lr"] = "lower_coef",
        min_coef: float = 1e-4,
        max_coef: float = 10.0,
        min_lr_factor: float = 0.1,
        cooldown: int | None = None,
    ) -> None:
        require_at_least("window", window, 3)
        require_positive("factor", factor)
        require(factor > 1, f"`factor` must be above 1, got {factor}.")
        require_within("slope_share", slope_share, 0, 1)
        require_positive("min_kl_growth", min_kl_growth)
        require_at_least("min_gain", min_gain, 0)
        choices = ("lower_coef", "lower_actor_lr")
        require(on_stall in choices, f"`on_stall` must be one of {choices}, got {on_stall!r}.")
        require_bounds("min_coef", min_coef, "max_coef", max_coef)
        require_positive("min_lr_factor", min_lr_factor)
        require_within("min_lr_factor", min_lr_factor, 0, 1)
        require_at_least("cooldown", cooldown, 0)
        self.window = window
        self.factor = factor
        self.thresholds = {
            "slope_share": slope_share,
            "min_kl_growth": min_kl_growth,
            "min_gain": min_gain,
        }
        self.lower = "kl_coef" if on_stall == "lower_coef" else "actor_lr_factor"
        self.bounds = {"kl_coef": (min_coef, max_coef), "actor_lr_factor": (min_lr_factor, 1.0)}
        self.cooldown = window if cooldown is None else cooldown
        self.steers = tuple(dict.fromkeys(["kl_coef", self.lower]))
        self._points: list[tuple[float, ...]] = []  # KL, mean score, spread of the scores
        self._best: float | None = None
        self._wait = 0

    @override
    def check(self, trainer: Any, pl_module: Any) -> None:
        check_kl_coef(pl_module, self.source, *self.bounds["kl_coef"])
        normalize = pl_module.reward_pipeline.processing.normalize
        if normalize not in ("none", "reference"):
            raise ConfigError(
                f"RewardPerKL compares the scores of iterations, and `reward_processing.normalize: "
                f"{normalize}` measures each with another scale: use `reference` or `none`."
            )

    @override
    def react(self, pl_module: Any, stats: IterationStats) -> None:
        point = measured(stats.kl_ref, stats.score_mean, stats.score_std)
        if point is None:
            return
        self._points = [*self._points, point][-self.window :]
        self._wait = max(self._wait - 1, 0)
        if len(self._points) == self.window and self._wait == 0:
            self._judge(pl_module)

    def _judge(self, pl_module: Any) -> None:
        kl, scores, spreads = zip(*self._points, strict=True)
        trend = window_trend(kl, scores)
        spread = sum(spreads) / len(spreads)
        payoff = payoff_of_kl(trend, best=self._best, spread=spread, **self.thresholds)
        if payoff == "paid":
            self._best = max(trend.reward_per_kl, self._best or 0.0)
        elif payoff == "fading":
            reason = f"{_figures(trend)}, once {self._best:.3g}"
            self._change(pl_module, "kl_coef", self.factor, reason)
        elif payoff == "stalled":
            self._change(pl_module, self.lower, 1 / self.factor, f"{_figures(trend)}, never more")

    def _change(self, pl_module: Any, dial: str, factor: float, reason: str) -> None:
        low, high = self.bounds[dial]
        before = self.law_value(pl_module, dial)
        after = min(max(before * factor, low), high)
        if after != before:
            self.steer(pl_module, dial, after, reason)
            self._wait = self.cooldown

    @override
    def state_dict(self) -> dict[str, Any]:
        points = [list(point) for point in self._points]
        return {"points": points, "best": self._best, "wait": self._wait}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._points = [tuple(point) for point in state_dict["points"]]
        self._best = state_dict["best"]
        self._wait = state_dict["wait"]


def _figures(trend: WindowTrend) -> str:
    return (
        f"KL rose by {trend.kl_growth:.3g} nats per response, the score by {trend.gain:.3g}: "
        f"{trend.reward_per_kl:.3g} per nat"
    )
