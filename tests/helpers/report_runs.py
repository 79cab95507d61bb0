"""Folders of made-up runs, as this project leaves them, for what reads and shows runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_lightning.io import as_jsonl, write_text_atomic
from ppo_lightning.metrics import POSITIONS, AnswerStats, IterationStats, MetricsWriter

HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=\"alert('1')\"> \" ' & "
"""A response that would run, and look, as its writer wants where it is not escaped."""


def healthy_row(iteration: int, **changed: Any) -> IterationStats:
    """One iteration of a run that learns as it should, with a wobble that repeats."""
    wobble = math.sin(iteration * 2.3)
    learnt = 1 - math.exp(-iteration / 12)
    values: dict[str, Any] = {
        "raw_score_mean": 1.5 * learnt + 0.05 * wobble,
        "raw_score_std": 1.0 - 0.2 * learnt,
        "raw_score_min": -2.5,
        "raw_score_max": 2.5 + learnt,
        "raw_score_skew": 0.1 * wobble,
        "raw_score_q05": 1.5 * learnt - 1.4,
        "raw_score_q25": 1.5 * learnt - 0.6,
        "raw_score_median": 1.5 * learnt,
        "raw_score_q75": 1.5 * learnt + 0.6,
        "raw_score_q95": 1.5 * learnt + 1.4,
        "score_mean": 1.5 * learnt + 0.05 * wobble,
        "score_std": 1.0 - 0.2 * learnt,
        "kl_ref": 4.0 * learnt + 0.1 * wobble,
        "kl_ref_per_token": 0.1 * learnt,
        "kl_coef": 0.1,
        "entropy": 2.0 - 0.5 * learnt,
        "kl_old": 0.008 + 0.002 * wobble,
        "clip_fraction": 0.06 + 0.02 * wobble,
        "policy_loss": 0.01 * wobble,
        "value_loss": 0.2 + math.exp(-iteration / 4),
        "explained_variance": 0.7 * learnt,
        "grad_norm_actor_max": 0.5 + 0.1 * wobble,
        "grad_norm_critic_max": 2.0 + 0.5 * wobble,
        "response_length_mean": 40.0 + 2 * wobble,
        "truncated_share": 0.02,
        "repeated_bigrams": 0.1,
        "lr_actor": 1e-6,
        "lr_critic": 5e-6,
        "num_responses": 512.0,
        "dropped_responses": 0.0,
        "actor_steps": 8.0,
        "steps_taken": 8.0,
    }
    return IterationStats(iteration=iteration, **(values | changed))


def far_row(iteration: int, **changed: Any) -> IterationStats:
    """The same, but its update went much too far."""
    return healthy_row(iteration, **({"kl_old": 0.5, "clip_fraction": 0.6} | changed))


def runaway_row(iteration: int, *, since: int) -> IterationStats:
    """The same, but KL to the reference grows from an iteration on, and nothing holds it."""
    if iteration < since:
        return healthy_row(iteration)
    grown = (iteration - since) * 0.9
    gold = AnswerStats(gold=1.0 - 0.02 * grown, gold_error=0.02, score=2.0, kl_ref=4.0 + grown)
    return healthy_row(iteration, kl_ref=4.0 + grown, kl_coef=0.0005, val_sampled=gold)


def write_metrics(
    folder: Path,
    rows: Sequence[IterationStats],
    changes: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
) -> Path:
    """Write ``metrics.jsonl``; ``changes`` by iteration."""
    writer = MetricsWriter(folder / "metrics.jsonl")
    for row in rows:
        writer.write(row, (changes or {}).get(row.iteration, ()))
    return folder / "metrics.jsonl"


def change(
    iteration: int, dial: str, before: float | None, after: float | None, **more: str
) -> Any:
    """One entry of a run's journal."""
    entry = {"iteration": iteration, "source": "AdaptiveKL", "dial": dial, "reason": ""}
    return {**entry, "before": before, "after": after, **more}


def full_run(folder: Path, iterations: int = 60) -> Path:
    """A run that falls ill in the middle, with all that can lie beside its metrics."""
    since = iterations // 2
    rows = [runaway_row(i, since=since) for i in range(iterations)]
    at = since + 8
    changes = {
        at: [change(at, "kl_coef", 0.0005, 0.002, reason="KL is above its target")],
        at + 5: [change(at + 5, "actor_lr_factor", 1.0, 0.5, source="Doctor")],
    }
    path = write_metrics(folder, rows, changes)
    _add_positions(path)
    histograms = [_histograms(i, iterations) for i in range(iterations)]
    write_text_atomic(folder / "histograms.jsonl", as_jsonl(histograms))
    for iteration in (0, iterations - 1):
        text = as_jsonl(_samples(iteration))
        write_text_atomic(folder / "samples" / f"iteration_{iteration:04d}.jsonl", text)
    undone = [
        {"iteration": since, "prompt": "again", "response": f"{score} " * 20, "score": score}
        for score in (-2.0, -1.0, 1.0, 2.0)
    ]
    write_text_atomic(folder / "rollbacks" / "1" / "texts.jsonl", as_jsonl(undone))
    report = f"# Rollback 1\n\nkl_explosion in iteration {since}: back to 10.\n"
    write_text_atomic(folder / "rollbacks" / "1" / "report.md", report)
    return folder


def _add_positions(path: Path) -> None:
    """Add entropy by position to every row."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        for start, places in enumerate(POSITIONS[:6]):
            share = math.exp(-row["run/iteration"] / (40 + start))
            row[f"rollout/entropy_at/{places}/mean"] = 2.0 * share * (1 - start / 12)
    text = "\n".join([head, *(json.dumps(row) for row in rows)])
    write_text_atomic(path, f"{text}\n")


def _histograms(iteration: int, iterations: int) -> dict[str, Any]:
    middle = 2.0 * iteration / iterations
    scores = [-3 + 0.25 * i for i in range(29)]
    lengths = [4.0 * i for i in range(17)]
    return {
        "run/iteration": iteration,
        "rollout/raw_score": {"edges": scores, "counts": _bell(scores, middle, 0.8)},
        "rollout/response_length": {
            "edges": lengths,
            "counts": _bell(lengths, 30 + 10 * middle, 8),
        },
    }


def _bell(edges: Sequence[float], middle: float, width: float) -> list[int]:
    return [round(100 * math.exp(-(((e - middle) / width) ** 2))) for e in edges[:-1]]


def _samples(iteration: int) -> list[dict[str, Any]]:
    texts = ["The sea is calm today.", HOSTILE, "A cat, a cat, a cat, a cat.", "Ich weiß es nicht."]
    return [
        {
            "iteration": iteration,
            "number": number,
            "mode": "sampled",
            "prompt": f"Prompt {number}: say something",
            "policy": f"{text} ({iteration})",
            "policy_score": 0.5 * number,
            "policy_components": {"polite": 0.25 * number},
            "policy_kl_ref": 3.0,
            "policy_num_tokens": 12,
            "reference": "Before, this was said.",
            "reference_score": 0.1,
        }
        for number, text in enumerate(texts)
    ]
