"""What the columns of a log mean: this project's names, and maps from those of other frameworks.

Only names that were found in a framework's own source are written down here. A *name* is a logged
one of this project, such as ``rollout/kl_ref``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ppo_lightning.errors import ConfigError, nearest
from ppo_lightning.metrics import IterationStats, metric_specs, section_specs

Values = dict[str, float]
"""What was measured in one iteration, by logged name."""

_SPECS = metric_specs(IterationStats)
NAME_OF = {attribute: spec.name for attribute, spec in _SPECS.items()}
"""Logged name of each field of ``IterationStats``."""

ITERATION = NAME_OF["iteration"]
AXES = (
    *(ITERATION, "iteration", "iter", "training/global_step", "train/global_step"),
    *("global_step", "step", "_step", "Step"),
)
"""Columns that number the rows, the best first."""

_SECTION_PREFIXES = tuple(
    spec.prefix.partition("{")[0] for spec in section_specs(IterationStats).values()
)


@dataclass(frozen=True)
class Target:
    """What one foreign column is.

    Args:
        fields: Fields of ``IterationStats`` that it gives; several where the framework has one
            number for what are two here.
        factor: What it is multiplied by.
    """

    fields: tuple[str, ...]
    factor: float = 1.0

    def without(self, names: Collection[str]) -> Target:
        """Return what is left of it if some logged names come from elsewhere."""
        left = tuple(name for name in self.fields if NAME_OF.get(name, name) not in names)
        return Target(left, self.factor)

    def read(self, value: float) -> Iterator[tuple[str, float]]:
        """Yield logged names and values."""
        for name in self.fields:
            yield NAME_OF.get(name, name), value * self.factor


@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """What the columns of one kind of log mean.

    Args:
        title: Who writes such logs.
        signs: Columns by which they are known; all of them must be there.
        targets: By column.
        prefix: May stand before every column.
        notes: What a reader should know of the numbers of a column.
    """

    title: str
    signs: tuple[str, ...] = ()
    targets: Mapping[str, Target] = field(default_factory=dict)
    prefix: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)

    def knows(self, columns: Collection[str]) -> bool:
        """Whether a log with these columns is of this kind."""
        plain = {column.removeprefix(self.prefix) for column in columns}
        return bool(self.signs) and plain.issuperset(self.signs)

    def read(self, row: Mapping[str, float]) -> Values:
        """Return what is known of a row; this project's own names stay as they are."""
        found: Values = {}
        for column, value in row.items():
            target = self.targets.get(column) or self.targets.get(column.removeprefix(self.prefix))
            found |= dict(target.read(value)) if target is not None else {column: value}
        return found


def _to(*names: str, times: float = 1.0) -> Target:
    return Target(names, times)


_SCORE = ("raw_score_mean", "score_mean")
_HALF = "its value loss carries a factor of one half, which is taken out"
_PER_TOKEN = (
    "its KL to the reference is of a token; that of a response is made with the mean length"
)
_ACTIVE = "its clip fraction counts the tokens whose gradient the clip removes"

PLAIN = ColumnMap(
    title="plain column names",
    targets={
        "reward_mean": _to(*_SCORE),
        "reward_std": _to("raw_score_std", "score_std"),
        "reward_min": _to("raw_score_min", "score_min"),
        "reward_max": _to("raw_score_max", "score_max"),
        "reward_skew": _to("raw_score_skew"),
        "kl_ref": _to("kl_ref"),
        "kl_ref_per_token": _to("kl_ref_per_token"),
        "entropy": _to("entropy"),
        "approx_kl": _to("kl_old"),
        "clip_frac": _to("clip_fraction"),
        "ratio_max": _to("ratio_max"),
        "policy_loss": _to("policy_loss"),
        "value_loss": _to("value_loss", times=2.0),
        "explained_variance": _to("explained_variance"),
        "value_mean": _to("value_mean"),
        "return_mean": _to("return_mean"),
        "adv_abs_max": _to("advantage_abs_max"),
        "adv_std": _to("advantage_std"),
        "grad_norm_actor": _to("grad_norm_actor_max"),
        "grad_norm_critic": _to("grad_norm_critic_max"),
        "resp_len_mean": _to("response_length_mean"),
        "truncated_frac": _to("truncated_share"),
        "ngram_repeat_frac": _to("repeated_bigrams"),
        "len_reward_corr": _to("score_length_correlation"),
        "behaviour_kl": _to("sampler_mismatch"),
        "policy_lag": _to("lag_mean"),
        "updates_done": _to("steps_taken"),
        "beta": _to("kl_coef"),
        "lr_actor": _to("lr_actor"),
        "gold_reward_mean": _to("val/sampled/gold"),
    },
    notes={"value_loss": _HALF},
)
"""Short names without a section; ``tokens``, ``reward_nonfinite_frac`` are made into counts."""

TRL = ColumnMap(
    title="columns of TRL's PPOTrainer",
    signs=("objective/kl", "objective/scores"),
    prefix="train/",
    targets={
        "objective/kl": _to("kl_ref"),
        "objective/scores": _to(*_SCORE),
        "objective/rlhf_reward": _to("reward_mean"),
        "policy/approxkl_avg": _to("kl_old"),
        "policy/clipfrac_avg": _to("clip_active_fraction"),
        "policy/entropy_avg": _to("entropy"),
        "loss/policy_avg": _to("policy_loss"),
        "loss/value_avg": _to("value_loss", times=2.0),
        "val/clipfrac_avg": _to("value_clip_fraction"),
        "val/ratio": _to("ratio_mean"),
        "lr": _to("lr_actor", "lr_critic"),
    },
    notes={
        "loss/value_avg": _HALF,
        "policy/clipfrac_avg": _ACTIVE,
        "policy/approxkl_avg": "its KL(old‖new) is half the squared log-ratio, padding included",
    },
)

OPENRLHF = ColumnMap(
    title="columns of OpenRLHF",
    signs=("policy_loss", "response_length", "total_length", "reward", "kl"),
    prefix="train/",
    targets={
        "kl": _to("kl_ref_per_token"),
        "reward": _to(*_SCORE),
        "return": _to("reward_mean"),
        "response_length": _to("response_length_mean"),
        "response_clip_ratio": _to("truncated_share"),
        "policy_loss": _to("policy_loss"),
        "critic_loss": _to("value_loss", times=2.0),
        "values": _to("value_mean"),
        "ppo_kl": _to("kl_old"),
        "ppo_clip_ratio": _to("clip_active_fraction"),
        "entropy_loss": _to("entropy"),
        "ptx_loss": _to("ptx_loss"),
        "actor_lr": _to("lr_actor"),
        "critic_lr": _to("lr_critic"),
    },
    notes={"critic_loss": _HALF, "ppo_clip_ratio": _ACTIVE, "kl": _PER_TOKEN},
)

VERL = ColumnMap(
    title="columns of verl",
    signs=("critic/score/mean", "actor/pg_loss"),
    targets={
        "critic/score/mean": _to(*_SCORE),
        "critic/score/max": _to("raw_score_max", "score_max"),
        "critic/score/min": _to("raw_score_min", "score_min"),
        "critic/rewards/mean": _to("reward_mean"),
        "critic/returns/mean": _to("return_mean"),
        "critic/values/mean": _to("value_mean"),
        "critic/vf_explained_var": _to("explained_variance"),
        "critic/vf_loss": _to("value_loss", times=2.0),
        "critic/vf_clipfrac": _to("value_clip_fraction"),
        "critic/grad_norm": _to("grad_norm_critic"),
        "critic/lr": _to("lr_critic"),
        "response_length/mean": _to("response_length_mean"),
        "response_length/max": _to("response_length_max"),
        "response_length/clip_ratio": _to("truncated_share"),
        "actor/entropy": _to("entropy"),
        "actor/entropy_loss": _to("entropy"),
        "actor/pg_loss": _to("policy_loss"),
        "actor/pg_clipfrac": _to("clip_active_fraction"),
        "actor/pg_clipfrac_lower": _to("dual_clip_fraction"),
        "actor/ppo_kl": _to("kl_old"),
        "actor/grad_norm": _to("grad_norm_actor"),
        "actor/lr": _to("lr_actor"),
        "actor/kl_loss": _to("kl_loss"),
        "actor/reward_kl_penalty": _to("kl_ref_per_token"),
        "actor/reward_kl_penalty_coeff": _to("kl_coef"),
    },
    notes={
        "critic/vf_loss": _HALF,
        "actor/pg_clipfrac": _ACTIVE,
        "actor/ppo_kl": "its KL(old‖new) is the mean log-ratio, which may be below 0",
        "actor/reward_kl_penalty": _PER_TOKEN,
    },
)

OWN = ColumnMap(title="ppo_lightning", signs=())
"""Names of this project, which need no map."""

MAPS: Mapping[str, ColumnMap] = {"trl": TRL, "openrlhf": OPENRLHF, "verl": VERL, "plain": PLAIN}
"""Names for ``--columns``."""


def is_known(name: str) -> bool:
    """Whether a logged name is one of this project's metrics."""
    return name in _KNOWN or name.startswith(_SECTION_PREFIXES)


_KNOWN = frozenset(NAME_OF.values())
_ENOUGH = 2
"""Plain names by which a log is taken for one of them: a single one may be chance."""


def recognise(columns: Collection[str]) -> ColumnMap | None:
    """Return the map of a log with these columns; None if nobody is known to write such."""
    if any(is_known(name) and name != ITERATION for name in columns):
        return OWN
    named = next((known for known in MAPS.values() if known.knows(columns)), None)
    if named is None and len(PLAIN.targets.keys() & columns) >= _ENOUGH:
        return PLAIN
    return named


def own_map(pairs: Mapping[str, str], base: ColumnMap) -> ColumnMap:
    """Add a user's own columns to a map; they win over others of the same meaning.

    Args:
        pairs: Column to logged name, or to a field of ``IterationStats``.
        base: What holds for the others.

    Raises:
        ConfigError: A name is no metric of this project, or two columns have the same.
    """
    names: dict[str, str] = {}
    for column, wanted in pairs.items():
        name = _logged_name(column, wanted)
        if name in names:
            raise ConfigError(
                f"columns `{names[name]}` and `{column}` are both given as `{name}`; leave one out."
            )
        names[name] = column
    added = {column: Target((name,)) for name, column in names.items()}
    title = base.title if base.targets or not pairs else "columns as given"
    return ColumnMap(
        title=title,
        signs=base.signs,
        targets={
            **{column: target.without(names) for column, target in base.targets.items()},
            **dict.fromkeys(names, Target(())),  # columns that have the very name
            **added,
        },
        prefix=base.prefix,
        notes=base.notes,
    )


def notes_for(known: ColumnMap, columns: Collection[str]) -> list[str]:
    """Return what a reader should know of the columns that are there."""
    plain = {column.removeprefix(known.prefix) for column in columns}
    return [note for column, note in known.notes.items() if column in plain]


def unused(known: ColumnMap, columns: Iterable[str]) -> list[str]:
    """Return the columns that nothing was made of; a log of this project may have newer ones."""
    if not known.targets:
        return []
    used = {*known.targets, *(known.prefix + name for name in known.targets), *AXES, *_MADE_OF}
    return [column for column in columns if column not in used and not is_known(column)]


def _logged_name(column: str, name: str) -> str:
    logged = NAME_OF.get(name, name)
    if is_known(logged):
        return logged
    near = nearest(name, [*_KNOWN, *NAME_OF])
    meant = f" Did you mean `{near}`?" if near else ""
    raise ConfigError(
        f"column `{column}`: `{name}` is no metric of this project.{meant} docs/metrics.md has all."
    )


# ---------------------------------------------------------------------- numbers that are made

_PENALTY, _KL = "objective/non_score_reward", "objective/kl"
_SOME_RESPONSES = 64.0
_MADE_OF = (
    *("tokens", "reward_nonfinite_frac", "nonfinite"),
    *(_PENALTY, f"{TRL.prefix}{_PENALTY}"),
)


def derived(rows: Sequence[Mapping[str, float]], read: Sequence[Values]) -> list[Values]:
    """Add to every row what follows from its columns.

    Args:
        rows: As in the log, in order.
        read: The same by logged name.
    """
    made, tokens = [], 0.0
    for row, values in zip(rows, read, strict=True):
        more = dict(values)
        _add_kl(more)
        if math.isfinite(row.get("tokens", math.nan)):
            _add_count(more, row["tokens"] - tokens)
            tokens = row["tokens"]
        if math.isfinite(share := row.get("reward_nonfinite_frac", math.nan)):
            # A share without a number is told as one of some responses.
            of = more.setdefault(NAME_OF["num_responses"], _SOME_RESPONSES) if share else 0.0
            more[NAME_OF["dropped_responses"]] = share * of
        _add_coefficient(row, more)
        made.append(more)
    return made


def _add_count(values: Values, tokens: float) -> None:
    """Responses of a buffer, from its tokens and their mean length."""
    length = values.get(NAME_OF["response_length_mean"], 0.0)
    if tokens > 0 and length > 0:
        values[NAME_OF["num_responses"]] = tokens / length


def _add_kl(values: Values) -> None:
    """KL of a response, from that of a token, where only this is logged."""
    per_token = values.get(NAME_OF["kl_ref_per_token"])
    length = values.get(NAME_OF["response_length_mean"])
    if NAME_OF["kl_ref"] not in values and per_token is not None and length is not None:
        values[NAME_OF["kl_ref"]] = per_token * length


def _add_coefficient(row: Mapping[str, float], values: Values) -> None:
    """β of TRL, which logs what the penalty took: ``-β · KL`` of a response."""
    for prefix in ("", TRL.prefix):
        penalty, kl = row.get(prefix + _PENALTY), row.get(prefix + _KL)
        if penalty is not None and kl and NAME_OF["kl_coef"] not in values:
            values[NAME_OF["kl_coef"]] = -penalty / kl
