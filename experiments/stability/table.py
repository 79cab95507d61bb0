"""The results as a Markdown table, and whether they hold what was asked of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experiments.stability.outcome import Outcome
from experiments.stability.scenarios import ITERATIONS, SCENARIOS

GAIN = 0.7  # of the healthy run's, with the mechanism
ILL = 0.3  # below this share of it a run counts as ill
MAX_DROP = 0.5  # of the gold score of hacked runs
MAX_KL = 10.0  # nats per response

_HEADER = """\
| sabotage | mechanism | gold at the end | of the healthy gain | drop | KL | besides | verdict |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def table(outcomes: Sequence[Outcome]) -> str:
    """Lay the outcomes out, a row for each sabotage and mechanism, seeds in order in a cell.

    Args:
        outcomes: In any order; what is missing is left out.
    """
    healthy = {o.seed: o for o in outcomes if (o.scenario, o.variant) == ("healthy", "without")}
    rows = [_HEADER]
    for name, scenario in SCENARIOS.items():
        for variant in scenario.variants:
            group = [o for o in outcomes if (o.scenario, o.variant) == (name, variant)]
            if group:
                rows.append(_row(sorted(group, key=lambda o: o.seed), healthy))
    return "\n".join(rows)


def gain_share(outcome: Outcome, healthy: Outcome | None) -> float | None:
    """Return the gain of gold as a share of the same seed's healthy run; None if unknown."""
    numbers = (outcome.gold, outcome.start, *((healthy.gold, healthy.start) if healthy else ()))
    if len(numbers) < 4 or None in numbers:
        return None
    gold, start, best, first = (float(number or 0.0) for number in numbers)
    return (gold - start) / (best - first)


def missed(outcome: Outcome, share: float | None) -> Iterator[str]:
    """Yield which of the bounds a run with a mechanism misses.

    Args:
        outcome: The run.
        share: Of the healthy gain.
    """
    if not outcome.finite:
        yield "weights not finite"
    if outcome.ended:
        yield outcome.ended
    if outcome.kl is None or outcome.kl >= MAX_KL:
        yield "KL"
    if SCENARIOS[outcome.scenario].hacking:
        if outcome.drop is None or outcome.drop > MAX_DROP:
            yield "drop"
    elif share is None or share < GAIN:
        yield "gain"


def is_ill(outcome: Outcome, share: float | None) -> bool:
    """Say whether a run without mechanism came to harm."""
    return not outcome.finite or bool(outcome.ended) or share is None or share < ILL


def _row(group: Sequence[Outcome], healthy: dict[int, Outcome]) -> str:
    name, variant = group[0].scenario, group[0].variant
    scenario = SCENARIOS[name]
    fault, *laid_over = (overlay.text for overlay in scenario.overlays(variant))
    shares = [gain_share(outcome, healthy.get(outcome.seed)) for outcome in group]
    cells = [
        fault if variant == "without" else "",
        "; ".join(["none", *filter(None, laid_over)]) if variant == "without" else laid_over[0],
        _each(group, lambda o: _number(o.gold, ".2f")),
        " ".join(_number(share, ".0%") for share in shares),
        _each(group, lambda o: _number(o.drop, ".2f")),
        _each(group, lambda o: _number(o.kl, ".1f")),
        "; ".join(_besides(group)),
        _verdict(group, shares),
    ]
    return f"| {' | '.join(cells)} |"


def _verdict(group: Sequence[Outcome], shares: Sequence[float | None]) -> str:
    pairs = list(zip(group, shares, strict=True))
    if group[0].variant == "without":
        if group[0].scenario == "healthy":
            return "healthy"
        ill = sum(is_ill(*pair) for pair in pairs)
        return "ill" if ill == len(pairs) else f"ill at {ill} of {len(pairs)} seeds"
    faults = [
        f"seed {outcome.seed} {what}" for outcome, share in pairs for what in missed(outcome, share)
    ]
    return "holds" if not faults else "missed: " + ", ".join(faults)


def _besides(group: Sequence[Outcome]) -> Iterator[str]:
    """Yield what else happened, with a figure for each seed."""
    if not all(o.finite for o in group):
        yield "weights not finite"
    for ended in sorted({o.ended for o in group if o.ended}):
        yield f"ended by {ended}"
    longest = max(o.iterations for o in group)
    if any(o.iterations < longest or o.ended for o in group) or longest < ITERATIONS:
        yield "iterations " + _each(group, lambda o: str(o.iterations))
    for what in ("rollbacks", "skipped", "dropped"):
        if any(getattr(o, what) for o in group):
            yield f"{what} " + _each(group, lambda o, what=what: str(getattr(o, what)))
    if all(o.kept is not None for o in group) and group[0].variant != "all":
        yield "gold of the kept checkpoint " + _each(group, lambda o: _number(o.kept, ".2f"))


def _each(group: Sequence[Outcome], cell: Callable[[Outcome], str]) -> str:
    return " ".join(cell(outcome) for outcome in group)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
