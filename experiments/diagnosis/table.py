"""Lay out what ``run.py`` has made: confusion, delay, treatment, and rules left out one by one.

python experiments/diagnosis/table.py --out runs/diagnosis
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.diagnosis.run import OTHER_SEED, Result, read
from experiments.diagnosis.scenarios import CASES, OTHER_WORLDS
from ppo_lightning.diagnostics import RULES, Examiner, Rule
from ppo_lightning.io import write_text_atomic
from ppo_lightning.metrics import IterationStats


def main() -> None:
    """Print all tables, and write them beside the results."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--out", type=Path, default=Path("runs/diagnosis"))
    folder = made.parse_args().out
    text = "\n".join(tables(read(folder / "results.jsonl"), folder / "rows"))
    print(text)
    write_text_atomic(folder / "table.md", text + "\n")


def tables(results: Sequence[Result], rows: Path) -> Iterator[str]:
    """Yield the lines of all tables.

    Args:
        results: Of ``run.py``.
        rows: Folder of the runs' rows.
    """
    watched = [r for r in results if r.policy == "observe"]
    known = [replayed(r, rows) for r in watched if r.seed < OTHER_SEED]
    yield from ("### Runs of the known world", "", *confusion(known, rows), "")
    for world in OTHER_WORLDS:
        others = [r for r in watched if r.seed // 100 == world]
        yield from (f"### Runs of world {world}", "", *confusion(others, rows), "")
    yield from ("### Treated and untreated", "", *treatment(results), "")
    yield from ("### Without the rule", "", *left_out(watched, rows))


def confusion(results: Sequence[Result], rows: Path) -> Iterator[str]:
    """Yield a row for each case: what leads, and how long it takes."""
    yield "| run | runs | right | leading diagnoses | first right, iterations after the fault | after gold's best | most above watch |"  # noqa: E501
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, case in CASES.items():
        group = [r for r in results if r.case == name]
        if not group:
            continue
        leads = Counter(r.top for r in group)
        right = sum(r.top in (case.accepted or ("healthy",)) for r in group)
        told = ", ".join(f"{top} {count}" for top, count in leads.most_common())
        delays = " ".join("–" if r.first_right is None else f"{r.first_right - case.onset:.0f}"
                          for r in group)  # fmt: skip
        after = " ".join(_after_best(r, rows) for r in group)
        most = max(r.above_watch for r in group)
        yield f"| {name} | {len(group)} | {right} | {told} | {delays} | {after} | {most} |"
    sick = [r for r in results if r.case != "healthy"]
    well = [r for r in results if r.case == "healthy"]
    hits = sum(r.top in CASES[r.case].accepted for r in sick)
    false = sum(r.top != "healthy" for r in well)
    yield ""
    yield f"{hits} of {len(sick)} ill runs right; {false} of {len(well)} healthy runs called ill."


def treatment(results: Sequence[Result]) -> Iterator[str]:
    """Yield a row for each case: the end of treated and untreated runs, seeds in order."""
    yield "| run | gold, untreated | gold, treated | KL, untreated | KL, treated | better by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    by_key = {r.key: r for r in results}
    for name, case in CASES.items():
        seeds = sorted(r.seed for r in results if r.case == name and r.policy == "act")
        pairs = [(by_key.get((name, "observe", s)), by_key[name, "act", s]) for s in seeds]
        both = [(a, b) for a, b in pairs if a is not None]
        if not both:
            continue
        columns = [
            " ".join(_number(getattr(r, field)) for r in side)
            for field in ("gold", "kl")
            for side in zip(*both, strict=True)
        ]
        gains = [_worth(b, case.kl_price) - _worth(a, case.kl_price) for a, b in both]
        price = f" (gold − {case.kl_price:g} · KL)" if case.kl_price else ""
        yield f"| {name} | {' | '.join(columns)} | {mean(gains):+.2f}{price} |"


def left_out(results: Sequence[Result], rows: Path) -> Iterator[str]:
    """Yield a row for each illness: what leads in its runs if its own rules are not asked."""
    yield "| run | still called ill | leading without its rules |"
    yield "| --- | --- | --- |"
    noticed, asked = 0, 0
    for name, case in CASES.items():
        if not case.accepted:
            continue
        others = [rule for rule in RULES if rule.illness not in case.accepted]
        tops = Counter(replayed(r, rows, others).top for r in results if r.case == name)
        ill, all_of_it = tops.total() - tops["healthy"], tops.total()
        noticed, asked = noticed + ill, asked + all_of_it
        told = ", ".join(f"{top} {n}" for top, n in tops.most_common())
        yield f"| {name} | {ill} of {all_of_it} | {told} |"
    yield ""
    yield f"{noticed} of {asked} runs are called ill by rules that know nothing of their illness."


def replayed(result: Result, rows: Path, rules: Sequence[Rule] = RULES) -> Result:
    """Return the result as the rules of today see it; for runs that were only observed."""
    examiner, leads = Examiner(rules), []
    for row in _rows(result, rows):
        found = examiner.examine(row)
        if found and found[0].severity != "watch":
            leads.append((row.iteration, found[0].illness))
    above = [d for d in examiner.summary() if d.severity != "watch"]
    right = [i for i, illness in leads if illness in CASES[result.case].accepted]
    return replace(
        result,
        top=above[0].illness if above else "healthy",
        above_watch=len(above),
        first_right=min(right, default=None),
        first_any=min((i for i, _ in leads), default=None),
    )


def _after_best(result: Result, rows: Path) -> str:
    """Iterations from the best gold score to the first right diagnosis."""
    if result.first_right is None:
        return "–"
    gold = {
        row.iteration: row.val_sampled.gold
        for row in _rows(result, rows)
        if row.val_sampled is not None and row.val_sampled.gold is not None
    }
    best = max(gold, key=lambda i: gold[i])
    return f"{result.first_right - best:.0f}"


def _rows(result: Result, rows: Path) -> list[IterationStats]:
    path = rows / f"{result.case}.{result.policy}.{result.seed}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [IterationStats.from_log(json.loads(line)) for line in lines]


def _worth(result: Result, kl_price: float) -> float:
    """Gold at the end, less what KL costs; a run that broke is worth its start at most."""
    gold = 0.0 if result.gold is None else result.gold
    return gold - kl_price * (result.kl or 0.0)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
