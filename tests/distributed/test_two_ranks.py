"""Two gloo processes under DDP: one decision for all, and the result of a single process."""

import os
from dataclasses import replace
from functools import partial

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.testing import assert_close

from ppo_lightning.configs import GroupConfig, GuardConfig, LoraConfig, OptimizerConfig
from ppo_lightning.distributed import (
    all_reduce_max,
    all_reduce_sum,
    any_rank,
    gather_objects,
    rank,
    whole,
)
from ppo_lightning.errors import ConfigError
from ppo_lightning.functional import whiten
from ppo_lightning.modules import FSDP2Strategy
from tests.helpers.cases import chosen
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import PoisonedAt, data_module, fit, parameters, ppo_module

VARIANTS = {
    "separate": {},
    "shared": {"critic_model": {"kind": "shared"}},
    "lora": {"policy": {"lora": LoraConfig(rank=4)}},
    "cut": {"ppo": {"microbatch_tokens": 25}},
    "sequence": {"ppo": {"loss_aggregation": "sequence"}},
}
CUT_SEQUENCES = {"ppo": {"microbatch_tokens": 25, "loss_aggregation": "sequence"}}


def train(model_dir, folder, variant, *, buffer=None, num_prompts=7, ranks=2, **overrides):
    """Fit, and return parameters, sampled ids by response number, and the last statistics."""
    given = VARIANTS | {"cut, sequence": CUT_SEQUENCES}
    settings = {k: dict(v) for k, v in given[variant].items()}
    settings["policy"] = {"dtype": "float64", **settings.get("policy", {})}
    module = ppo_module(
        model_dir,
        actor=GroupConfig(lr=1e-2),
        optimizer=OptimizerConfig(name="SGD"),
        **{**settings, **overrides},
    )
    recorder = fit(
        folder,
        module,
        data_module(
            buffer={"num_prompts": num_prompts, "num_minibatches": 3} | (buffer or {}),
            val_prompts=["no"],
        ),
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
        max_epochs=2,  # the second samples with what the first has trained
        enable_checkpointing=False,
    )
    ids = [
        {
            int(index): row
            for index, row in zip(c.experience.indices, c.completions.response_ids, strict=True)
        }
        for c in recorder.collected
    ]
    stats = [
        {k: v for k, v in s.to_log().items() if k[:4] not in ("time", "run/")}
        for s in recorder.stats
    ]
    values = {name: value.numpy() for name, value in parameters(module).items()}
    return values, ids, stats


QUICK = [("gpt2", "separate"), ("llama", "shared"), ("llama", "lora"), ("gpt2", "cut, sequence")]


# Slow: each variant with the other family too, and the two of the last on their own.
@pytest.mark.parametrize(("family", "variant"), chosen(QUICK, ("gpt2", "llama"), VARIANTS))
def test_t40_t49_two_ranks_give_the_result_of_one(request, tmp_path, family, variant):
    """Seven responses in three minibatches on two ranks: the same responses and parameters."""
    tiny_model_dir = request.getfixturevalue(f"tiny_{family}_dir")
    alone, ids, stats = train(tiny_model_dir, tmp_path, variant, ranks=1)
    first, second = run_on_ranks(train, 2, tiny_model_dir, tmp_path, variant)
    for mine, theirs in zip(first[1], second[1], strict=True):
        assert not mine.keys() & theirs.keys()
    merged = [a | b for a, b in zip(first[1], second[1], strict=True)]
    assert merged == ids
    for name, value in alone.items():
        assert (first[0][name] == second[0][name]).all(), name
        assert_close(torch.tensor(first[0][name]), torch.tensor(value), rtol=0, atol=1e-9)
    for ours, one in zip(first[2], stats, strict=True):
        # Llama computes its norms in float32: a KL near 0 is a difference of such numbers.
        assert ours == pytest.approx(one, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt2", (5, 3, 3)),
        ("llama", (3, 2, 3)),
        ("gpt2", (1, 3, 1)),
        # The same sizes with the other family.
        pytest.param("llama", (5, 3, 3), marks=pytest.mark.slow),
        pytest.param("gpt2", (3, 2, 3), marks=pytest.mark.slow),
        pytest.param("llama", (1, 3, 1), marks=pytest.mark.slow),
    ],
)
def test_prompts_that_stay_together_do_so_on_two_ranks(request, tmp_path, family, sizes):
    tiny_model_dir = request.getfixturevalue(f"tiny_{family}_dir")
    names = ("num_prompts", "responses_per_prompt", "num_minibatches")
    buffer = dict(zip(names, sizes, strict=True)) | {"shuffle": "prompts"}
    alone, _, _ = train(tiny_model_dir, tmp_path, "separate", buffer=buffer, ranks=1)
    first, _ = run_on_ranks(partial(train, buffer=buffer), 2, tiny_model_dir, tmp_path, "separate")
    # Which rows of a prompt a rank has decides what is added up before a float32 norm of Llama's.
    atol = 1e-7 if "llama" in tiny_model_dir.name else 1e-9
    for name, value in alone.items():
        found = torch.tensor(first[0][name])
        assert_close(found, torch.tensor(value), rtol=0, atol=atol, msg=name)


STRATEGIES = {"ddp": lambda: "ddp", "fsdp": FSDP2Strategy}


def kl_over_the_limit_on_one_rank(model_dir, folder, strategy):
    """Only rank 0's tokens move: its advantages are made large, rank 1's are zero."""
    module = ppo_module(model_dir, ppo={"target_kl": 1e-4}, actor=GroupConfig(lr=3e-3))
    collect = module.collect

    def lopsided(prompts, **settings):
        experience = collect(prompts, **settings)
        factor = 0.0 if rank() else 5.0
        return replace(experience, advantages=experience.advantages * factor)

    module.collect = lopsided
    recorder = fit_on_two(folder, module, strategy)
    grads = [p.grad is None for p in module.parameters()]
    return [(s.kl_stopped, s.steps_taken, s.steps_skipped_kl) for s in recorder.stats], all(grads)


def fit_on_two(folder, module, strategy, data=None, **options):
    return fit(
        folder,
        module,
        data or data_module(),
        strategy=STRATEGIES[strategy](),
        devices=2,
        enable_checkpointing=False,
        **options,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t42_ranks_stop_together(tiny_llama_dir, tmp_path, strategy):
    found = run_on_ranks(kl_over_the_limit_on_one_rank, 2, tiny_llama_dir, tmp_path, strategy)
    first, second = found
    assert first == second
    decisions, cleared = first
    assert any(stopped for stopped, _, _ in decisions)
    assert all(taken + skipped == 4 for stopped, taken, skipped in decisions if stopped)
    assert cleared


def poisoned_on_one_rank(model_dir, folder, strategy):
    """Rank 1's loss is not finite at its second update."""
    module = ppo_module(model_dir)
    poison = Poison({2} if os.environ["RANK"] == "1" else set())
    recorder = fit_on_two(folder, module, strategy, callbacks=[poison])
    values = {name: whole(value).numpy() for name, value in parameters(module).items()}
    finite = all(numpy.isfinite(value).all() for value in values.values())
    return [s.steps_skipped_nonfinite for s in recorder.stats], bool(finite), values


class Poison(pl.Callback):
    """Makes the loss of chosen updates not finite once the networks are there."""

    def __init__(self, calls):
        self.calls = calls

    def on_fit_start(self, trainer, pl_module):
        PoisonedAt(pl_module, calls=self.calls)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t42_ranks_skip_together(tiny_llama_dir, tmp_path, strategy):
    first, second = run_on_ranks(poisoned_on_one_rank, 2, tiny_llama_dir, tmp_path, strategy)
    assert first[:2] == second[:2] == ([1, 0, 0], True)
    assert all((first[2][name] == second[2][name]).all() for name in first[2])


def reductions():
    torch.distributed.init_process_group("gloo")
    values = torch.tensor([[1.0, 3.0]]) if rank() == 0 else torch.tensor([[5.0, 7.0]])
    mask = torch.ones_like(values, dtype=torch.bool)
    return (
        whiten(values, mask, reduce=all_reduce_sum).tolist(),
        all_reduce_max(torch.tensor(float(rank()))).item(),
        any_rank(rank() == 1, torch.device("cpu")),
        gather_objects([(rank(), "é")] * rank()),
    )


def test_t32_whitening_has_one_mean_over_the_ranks():
    first, second = run_on_ranks(reductions, 2)
    deviation = 5**0.5
    assert first[0][0] == pytest.approx([-3 / deviation, -1 / deviation])
    assert second[0][0] == pytest.approx([1 / deviation, 3 / deviation])
    assert first[1:] == second[1:] == (1.0, True, [(1, "é")])


def too_few_responses(model_dir, folder):
    """One response for two ranks."""
    data = data_module(buffer={"num_prompts": 1, "num_minibatches": 1})
    with pytest.raises(ConfigError, match=r"1 responses cannot be shared by 2 ranks"):
        fit(folder, ppo_module(model_dir), data, strategy="ddp", devices=2)
    return True


def test_t40_a_rank_without_responses_is_refused_with_the_numbers(tiny_llama_dir, tmp_path):
    assert run_on_ranks(too_few_responses, 2, tiny_llama_dir, tmp_path) == [True, True]


class StopOnOneRank(pl.Callback):
    """A callback that forgets the other ranks.

    Args:
        hook: In which it asks for the end.
        call: In which call of it, from 1.
    """

    def __init__(self, hook, call):
        self.call, self.count = call, 0
        setattr(self, hook, self.ask)

    def ask(self, trainer, *arguments):
        self.count += 1
        if trainer.global_rank == 0 and self.count == self.call:
            trainer.should_stop = True


STOPS = {
    "ddp": [
        ("on_train_batch_end", 2, [2.0]),
        # Before an iteration's first step: it is sampled, and ends with that step.
        ("on_train_epoch_start", 2, [4.0, 1.0]),
        ("on_rollout_end", 1, [1.0]),
        # Between two iterations.
        ("on_validation_end", 1, [4.0]),
        ("on_train_epoch_end", 2, [4.0, 4.0]),
        ("on_train_start", 1, []),
    ],
    "fsdp": [("on_train_batch_end", 2, [2.0])],
}


def stopped_by_one_rank(model_dir, folder, strategy):
    """One run after another, each of which is asked to stop elsewhere: the steps of each."""
    found = []
    for hook, call, _ in STOPS[strategy]:
        callback = StopOnOneRank(hook, call)
        data = data_module(val_prompts=["no", "what"])
        module = ppo_module(model_dir)
        recorder = fit_on_two(folder, module, strategy, data, callbacks=[callback])
        found.append((hook, call, [s.steps_taken for s in recorder.stats]))
    return found


@pytest.mark.parametrize("strategy", STOPS)
def test_t42_a_stop_that_one_rank_asks_for_is_every_ranks(tiny_llama_dir, tmp_path, strategy):
    first, second = run_on_ranks(stopped_by_one_rank, 2, tiny_llama_dir, tmp_path, strategy)
    assert first == second == STOPS[strategy]


def stopped_early(model_dir, folder):
    """Held-out answers of one prompt are the first rank's; their score decides for both."""
    early = EarlyStopping("val/greedy/score", mode="max", patience=1, min_delta=1e6)
    recorder = fit(
        folder,
        ppo_module(model_dir),
        data_module(val_prompts=["no"]),
        strategy="ddp",
        devices=2,
        enable_checkpointing=False,
        max_epochs=6,
        callbacks=[early],
    )
    return [s.iteration for s in recorder.stats], early.stopped_epoch


def test_t42_an_early_stop_is_every_ranks(tiny_llama_dir, tmp_path):
    assert run_on_ranks(stopped_early, 2, tiny_llama_dir, tmp_path) == [([0, 1], 1)] * 2


def strict_review(model_dir, folder):
    module = ppo_module(model_dir, guards=GuardConfig(advice="error"), ppo={"num_update_epochs": 9})
    with pytest.raises(ConfigError, match="num_update_epochs"):
        fit(folder, module, data_module(), strategy="ddp", devices=2)
    return True


def test_a_strict_review_ends_all_ranks_with_its_message(tiny_llama_dir, tmp_path):
    assert run_on_ranks(strict_review, 2, tiny_llama_dir, tmp_path) == [True, True]


def reductions_of_an_update(model_dir, folder):
    """Buckets of gradients that ranks add up in a minibatch: whole, and of several microbatches."""
    found = []
    for tokens in (None, 20):
        module = ppo_module(model_dir, ppo={"num_update_epochs": 1, "microbatch_tokens": tokens})
        counted = Counted()
        fit_on_two(folder, module, "ddp", callbacks=[counted], max_epochs=1)
        found.append(counted.number)
    return found


class Counted(pl.Callback):
    """Counts what DDP hands to its communication hook."""

    def __init__(self):
        self.number = 0

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.model.register_comm_hook(self, Counted.hook)

    @staticmethod
    def hook(
        counted: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        counted.number += 1
        return allreduce_hook(None, bucket)


def test_t38_ranks_add_gradients_up_once_for_all_microbatches(tiny_llama_dir, tmp_path):
    (whole, cut), _ = run_on_ranks(reductions_of_an_update, 2, tiny_llama_dir, tmp_path)
    assert whole == cut > 0
