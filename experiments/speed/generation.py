"""Sampling by this project against plain ``generate`` of transformers, in alternation.

    python experiments/speed/generation.py                            # S, M, L; fixed and variable
    python experiments/speed/generation.py --sizes M --modes variable --rounds 5 --threads 1

The same weights, prompts of equal length, sampling at temperature 1 and no filter, in one process,
one call after the other, one warm-up of each:

* ``native``: ``NativeEngine.generate`` as a training run calls it. It returns, beside the tokens,
  the log-probability of each under the sampler, and its draws do not depend on the batch;
* ``plain``: ``model.generate`` with its default cache and an end token, nothing else asked for: the
  least that transformers can sample with;
* ``scores``: the same with ``return_dict_in_generate`` and ``output_scores``, the scores stacked:
  what TRL's ``batch_generation`` does, where log-probabilities are made of them later.

Neither of the latter computes log-probabilities. A row of ``--out`` is one call. Compared is time
per response token, ended rows' padding not counted: wall time on two threads on a quiet machine,
else processor time of one thread. Ratios are the other's over ours, median and range over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from experiments.speed import ppo, rows
from experiments.speed.rows import Run
from experiments.speed.sizes import EOS, PAD, SIZES, Size, prompts, word_tokenizer, write_models
from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.data import PromptSet, as_source, make_prompt_batch
from ppo_lightning.models import load_causal_lm
from ppo_lightning.rollout import NativeEngine, StopRules
from ppo_lightning.types import PromptBatch

ROOT = Path(__file__).resolve().parents[2]

OTHERS = ("plain", "scores")


def planned(given: Any) -> Iterator[Run]:
    """All calls; those of a round follow each other, and every other round backwards."""
    for size in given.sizes:
        for mode in given.modes:
            for number in range(given.rounds):
                order = ("native", *OTHERS)
                for who in order if number % 2 == 0 else reversed(order):
                    yield Run(who, size, mode, number, given.threads)


class Bench:
    """Model, prompts and the callables of one size and mode, made when first asked for."""

    def __init__(self) -> None:
        self._of: tuple[str, str] | None = None
        self._samplers: dict[str, Callable[[int], Tensor]] = {}

    def measure(self, call: Run) -> dict[str, Any]:
        """Make one call; returns its times and the number of response tokens."""
        if self._of != (call.size, call.mode):
            self._of = call.size, call.mode
            self._samplers = samplers(SIZES[call.size], call.mode)
            for sample in self._samplers.values():
                sample(-1)
        wall, cpu = time.perf_counter(), time.process_time()
        lengths = self._samplers[call.who](call.round)
        tokens = int(lengths.sum())
        return {
            "wall_seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": tokens,
            "responses": len(lengths),
            "torch": torch.__version__,
        }


def samplers(size: Size, mode: Any) -> dict[str, Callable[[int], Tensor]]:
    """Return what samples, by name: from the number of a round to lengths ``[B]``."""
    with tempfile.TemporaryDirectory() as folder:
        write_models(size, mode, Path(folder))
        policy = str(Path(folder) / "policy")
        ours = load_causal_lm(PolicyConfig(path=policy)).eval()
        theirs = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    batch = prompt_batch(size)
    scores = {"return_dict_in_generate": True, "output_scores": True}
    return {
        "native": partial(native, ours, batch, size),
        "plain": partial(plain, theirs, batch, size, {}),
        "scores": partial(plain, theirs, batch, size, scores),
    }


def prompt_batch(size: Size) -> PromptBatch:
    """Make the prompts of a rollout."""
    source = as_source(prompts(size, size.rollout))
    made = PromptSet.build(source, word_tokenizer(size), chat=False)
    numbers = torch.arange(size.rollout)
    return make_prompt_batch(
        made, numbers.tolist(), keys=numbers, indices=numbers, groups=numbers, pad_id=PAD
    )


def native(model: PreTrainedModel, batch: PromptBatch, size: Size, number: int) -> Tensor:
    """Sample with this project's engine."""
    rollout = NativeEngine().generate(
        model,
        replace(batch, keys=batch.keys + (number + 1) * len(batch)),
        sampling=SamplingConfig(max_new_tokens=size.response_len),
        stops=StopRules(end_ids=(EOS,), pad_id=PAD),
        policy_version=0,
    )
    return rollout.response_mask.sum(1)


@torch.no_grad()
def plain(
    model: Any, batch: PromptBatch, size: Size, wanted: Mapping[str, bool], number: int
) -> Tensor:
    """Sample with ``generate``."""
    torch.manual_seed(number + 1)
    output = model.generate(
        input_ids=batch.prompt_ids,
        attention_mask=batch.prompt_mask.long(),
        generation_config=GenerationConfig(
            max_new_tokens=size.response_len,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=EOS,
            pad_token_id=PAD,
        ),
        **wanted,
    )
    if wanted:
        torch.stack(output.scores, 1)
        output = output.sequences
    ids = output[:, batch.prompt_ids.shape[1] :]
    ended = (ids == EOS).int()
    return torch.where(ended.any(1), ended.argmax(1) + 1, ids.shape[1])


def per_token(result: Mapping[str, Any], threads: int) -> float:
    """Seconds of a response token: wall time, or of one thread the processor's."""
    return float(result["wall_seconds" if threads > 1 else "cpu_seconds"]) / result["tokens"]


def ratios(results: Mapping[Run, Mapping[str, Any]], given: Any) -> Iterator[str]:
    """Say how many times as long the others take per token, for each size and mode."""
    for size in given.sizes:
        for mode in given.modes:
            for who in OTHERS:
                found, own = [], []
                for number in range(given.rounds):
                    pair = [
                        Run(name, size, mode, number, given.threads) for name in (who, "native")
                    ]
                    if all(call in results for call in pair):
                        other, ours = (per_token(results[call], given.threads) for call in pair)
                        found.append(other / ours)
                        own.append(1 / ours)
                if found:
                    yield (
                        f"{size} {mode} {who}: {statistics.median(found):.2f} ({min(found):.2f} to "
                        f"{max(found):.2f}, {len(found)} rounds; ours "
                        f"{statistics.median(own):,.0f} tokens/s)"
                    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the calls that are missing, and print the ratios."""
    given = parser().parse_args(arguments)
    torch.set_num_threads(given.threads)
    ppo.quieten()
    bench = Bench()
    results = rows.complete(given.out, Run, planned(given), bench.measure)
    print("\n".join(ratios(results, given)))


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    made.add_argument("--modes", nargs="+", default=["fixed", "variable"])
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--out", type=Path, default=ROOT / "runs" / "speed" / "generation.jsonl")
    return made


if __name__ == "__main__":
    main()
