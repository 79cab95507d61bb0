"""The doctor on two gloo processes: one diagnosis, the same dials, one end, whoever measured it."""

import os
import warnings

import pytest
import torch
from lightning.pytorch import Callback

from ppo_lightning.callbacks import Doctor, TreatmentConfig
from ppo_lightning.configs import LoraConfig
from ppo_lightning.diagnostics import Evidence, Finding, Rule, RuleLimits
from ppo_lightning.distributed import whole
from ppo_lightning.modules import FSDP2Strategy, last_checkpoint
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import Recorder, data_module, ppo_module, trainer

VARIANTS = {
    "separate": {},
    "lora": {"policy": {"lora": LoraConfig(rank=4)}},
    "shared": {"critic_model": {"kind": "shared"}},
    "lora-shared": {
        "policy": {"lora": LoraConfig(rank=4)},
        "critic_model": {"kind": "shared"},
    },
}
STRATEGIES = {
    "one": lambda: ("auto", 1),
    "ddp": lambda: ("ddp", 2),
    "fsdp": lambda: (FSDP2Strategy(), 2),
}
TOO_LOW = RuleLimits(kl_old=1e-12)
"""Whatever an update does goes too far."""


class At(Rule):
    """Sees an illness in some iterations, on all ranks or on one alone."""

    confirm = 1

    def __init__(self, iterations, *, severity="ill", rank=None):
        self.illness, self.iterations = "kl_runaway", iterations
        self.severity, self.rank = severity, rank

    def examine(self, course, limits):
        """Look at the number of the iteration alone."""
        here = self.rank in (None, int(os.environ.get("RANK", 0)))
        if not here or course.now.iteration not in self.iterations:
            return None
        return Finding(severity=self.severity, evidence=(Evidence(metric="x", now=1.0),))


class Broken(At):
    """Sees nothing on one rank, and raises on the other."""

    def examine(self, course, limits):
        """Divide by zero where it would see something."""
        return super().examine(course, limits) and 1 / 0


class Dials(Callback):
    """Keeps all dials, and what the doctor says, of each iteration."""

    def __init__(self, doctor):
        self.doctor, self.dials, self.said = doctor, [], []

    def on_iteration_end(self, trainer, module, stats):
        self.dials.append({name: module.controls[name] for name in module.controls._dials})
        self.said.append([(d.illness, d.severity, d.since) for d in self.doctor.diagnoses])


def train(model_dir, folder, doctor, *, kind="ddp", variant="separate", epochs=4):
    """Fit up to so many iterations, from the file that is there.

    Returns:
        By name what a rank has at the end.
    """
    strategy, ranks = STRATEGIES[kind]()
    torch.manual_seed(0)
    module, dials, recorder = ppo_module(model_dir, **VARIANTS[variant]), Dials(doctor), Recorder()
    run = trainer(
        folder,
        callbacks=[recorder, doctor, dials],
        strategy=strategy,
        devices=ranks,
        max_epochs=epochs,
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(module, data_module(), ckpt_path=last_checkpoint(run))
    return {
        "dials": dials.dials,
        "said": dials.said,
        "journal": [e for e in module.controls.journal if e["source"] == "Doctor"],
        "stats": [stats.to_log() for stats in recorder.stats],
        "weights": {n: whole(p.detach()).numpy() for n, p in module.named_parameters()},
        "told": [str(w.message) for w in told if str(w.message).startswith("Doctor")],
    }


def alike(first, second):
    """Demand that two ranks have measured, said and done the very same."""
    for name in ("stats", "said", "dials", "journal"):
        assert first[name] == second[name], name
    assert all((value == second["weights"][n]).all() for n, value in first["weights"].items())
    return first


def examined(model_dir, folder, policy, kind, variant):
    """All of this project's rules, with a limit that every run is beyond, and one more."""
    doctor = Doctor(policy=policy, rules=[At({1})], limits=TOO_LOW, report="none")
    return train(model_dir, folder, doctor, kind=kind, variant=variant)


@pytest.mark.parametrize(
    ("policy", "kind", "variant"),
    [
        ("observe", "ddp", "separate"),
        ("advise", "fsdp", "lora"),
        ("act", "ddp", "lora"),
        ("act", "fsdp", "shared"),
        pytest.param("act", "ddp", "shared", marks=pytest.mark.slow),
        pytest.param("act", "ddp", "lora-shared", marks=pytest.mark.slow),
        pytest.param("act", "fsdp", "lora-shared", marks=pytest.mark.slow),
        pytest.param("advise", "ddp", "shared", marks=pytest.mark.slow),
    ],
)
def test_t42_ranks_find_the_same_and_turn_the_same(tiny_llama_dir, tmp_path, policy, kind, variant):
    both = run_on_ranks(examined, 2, tiny_llama_dir, tmp_path, policy, kind, variant)
    found = alike(*both)
    assert {"update_too_large", "kl_runaway"} <= {illness for illness, *_ in found["said"][-1]}
    assert bool(turned(found)) == (policy == "act")


def turned(found):
    return {e["dial"] for e in found["journal"] if "illness" not in e["dial"]}


def stopped(model_dir, folder, kind, rank):
    doctor = Doctor(
        policy="act",
        rules=[At({1}, severity="critical", rank=rank)],
        stop_on=["kl_runaway"],
        report="none",
    )
    return train(model_dir, folder, doctor, kind=kind)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_t42_an_illness_that_ends_the_run_ends_it_on_both_ranks(tiny_gpt2_dir, tmp_path, kind):
    found = alike(*run_on_ranks(stopped, 2, tiny_gpt2_dir, tmp_path, kind, None))
    assert len(found["stats"]) == 2
    assert found["journal"][-1]["dial"] == "stop"


@pytest.mark.parametrize(("rank", "iterations"), [(0, 2), (1, 4)])
def test_t42_the_first_rank_has_the_say_on_the_end(tiny_gpt2_dir, tmp_path, rank, iterations):
    found = alike(*run_on_ranks(stopped, 2, tiny_gpt2_dir, tmp_path, "ddp", rank))
    assert len(found["stats"]) == iterations


def asked(model_dir, folder, rule):
    doctor = Doctor(policy="act", rules=[rule], report="none")
    return train(model_dir, folder, doctor)


@pytest.mark.parametrize("rank", [0, 1])
def test_t42_a_rule_that_sees_it_on_one_rank_alone_turns_all_dials_or_none(
    tiny_llama_dir, tmp_path, rank
):
    found = alike(*run_on_ranks(asked, 2, tiny_llama_dir, tmp_path, At({1}, rank=rank)))
    assert ("kl_coef" in turned(found)) == (rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_t42_a_rule_that_fails_on_one_rank_alone_is_told_of_once(tiny_llama_dir, tmp_path, rank):
    both = run_on_ranks(asked, 2, tiny_llama_dir, tmp_path, Broken({1, 2}, rank=rank))
    assert len(alike(*both)["stats"]) == 4
    (told,) = both[0]["told"]
    assert "the rule on `kl_runaway` (Broken) failed in iteration 1: ZeroDivisionError" in told
    assert both[1]["told"] == []


def in_part(model_dir, folder, kind, epochs):
    treatment = TreatmentConfig(wait=1, undo_after=2)
    doctor = Doctor(
        policy="act",
        rules=[At({0, 1, 3})],
        ignore=["rank_trouble"],  # what it sees depends on the clock
        report="none",
        treatment=treatment,
    )
    return train(model_dir, folder, doctor, kind=kind, epochs=epochs)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ddp", "one"),
        pytest.param("fsdp", "ddp", marks=pytest.mark.slow),
        pytest.param("one", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_t53_the_doctor_goes_on_where_it_was_on_other_ranks(
    tiny_llama_dir, tmp_path, first, second
):
    def run(folder, kind, epochs):
        _, ranks = STRATEGIES[kind]()
        return run_on_ranks(in_part, ranks, tiny_llama_dir, folder, kind, epochs)

    (whole_run, *_) = run(tmp_path / "whole", "one", 6)
    run(tmp_path / "part", first, 3)
    for found in run(tmp_path / "part", second, 6):
        assert found["dials"] == whole_run["dials"][3:]
        assert found["said"] == whole_run["said"][3:]
        ours, wanted = found["journal"], whole_run["journal"]
        assert [(e["iteration"], e["dial"], e["after"]) for e in ours] == [
            (e["iteration"], e["dial"], e["after"]) for e in wanted
        ]
