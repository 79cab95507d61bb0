"""Supervised fine-tuning of tiny models through the Trainer."""

import json
import math
from itertools import product

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_lightning.configs import GroupConfig, LoraConfig, OptimizerConfig
from ppo_lightning.errors import CheckpointError, ConfigError, DataError, ModelError, UpdateError
from ppo_lightning.metrics import SFTStats, read_step_metrics
from tests.helpers.cases import crossed
from tests.helpers.runs import data_module, ppo_module
from tests.helpers.sft_runs import (
    DEMONSTRATIONS,
    HELD_OUT,
    StepRecorder,
    fit_sft,
    sft_data,
    sft_module,
    sft_trainer,
    weights_of,
)
from tests.helpers.tiny_models import build_gpt2

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
]

SGD = {"optimizer": OptimizerConfig(name="SGD"), "actor": GroupConfig(lr=1e-1)}
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"hello {word}"},
            {"role": "assistant", "content": f"the {word} sat"},
            {"role": "user", "content": "why"},
            {"role": "assistant", "content": "yes it is"},
        ]
    }
    for word in ("cat", "dog", "bird", "tree", "house")
]


def each_step(folder):
    return ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_it_learns_and_says_so(tiny_model_dir, tmp_path):
    module = sft_module(tiny_model_dir, actor=GroupConfig(lr=1e-2))
    recorder = fit_sft(tmp_path, module, sft_data(batch_size=7), max_epochs=12)
    losses = [row.loss for row in recorder.rows if row.loss is not None]
    assert losses[-1] < 0.5 * losses[0]
    assert len(losses) == 12


def test_every_step_reads_a_stretch_of_the_epochs_order(tiny_gpt2_dir, tmp_path):
    recorder = fit_sft(tmp_path, sft_module(tiny_gpt2_dir), sft_data())
    assert [len(read) for read in recorder.read] == [3, 3, 1, 3, 3, 1]
    first, second = recorder.read[:3], recorder.read[3:]
    whole = {f"demonstrations[{n}]" for n in range(7)}
    assert {o for read in first for o in read} == {o for read in second for o in read} == whole
    assert first != second


CUTS = list(product((False, True), (None, 12, 40)))


def each_with_one_family():
    """Cuts and families in turn; a cut with the other family is for the slow tests."""
    for number, (packing, budget) in enumerate(CUTS):
        for place, family in enumerate(("gpt2", "llama")):
            other = () if number % 2 == place else pytest.mark.slow
            yield pytest.param(family, packing, budget, marks=other)


@pytest.mark.parametrize(
    ("tiny_model_dir", "packing", "budget"), [*each_with_one_family()], indirect=["tiny_model_dir"]
)
def test_t38_cut_and_packing_leave_the_step_alone(tiny_model_dir, tmp_path, budget, packing):
    """However a step is cut into passes, or its rows are filled: the same weights."""
    options = {"policy": {"dtype": "float64"}, **SGD}
    whole = sft_module(tiny_model_dir, microbatch_tokens=None, **options)
    reference = fit_sft(tmp_path / "a", whole, sft_data())
    cut = sft_module(tiny_model_dir, microbatch_tokens=budget, packing=packing, **options)
    found = fit_sft(tmp_path / "b", cut, sft_data())
    for name, value in weights_of(whole).items():
        assert_close(weights_of(cut)[name], value, rtol=0, atol=1e-9)
    for ours, one in zip(found.rows, reference.rows, strict=True):
        assert (ours.loss, ours.tokens) == pytest.approx((one.loss, one.tokens))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bfloat16_packing_and_recomputed_activations_go_together(
    tiny_llama_dir, tmp_path, attention
):
    policy = {"attn_implementation": attention, "gradient_checkpointing": True}
    options = {"packing": True, "microbatch_tokens": 40}
    coarse = sft_module(tiny_llama_dir, policy=policy, **options)
    found = fit_sft(tmp_path / "a", coarse, sft_data(), precision="bf16-mixed")
    fine = fit_sft(tmp_path / "b", sft_module(tiny_llama_dir), sft_data())
    for ours, theirs in zip(found.rows, fine.rows, strict=True):
        numbers = [(row.loss or row.val_loss) for row in (ours, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.03)


def test_t39_a_step_is_one_mean_over_its_tokens(tiny_gpt2_dir, tmp_path):
    """Not a mean of the examples' means: a long answer counts by its tokens."""
    module = sft_module(tiny_gpt2_dir, microbatch_tokens=12, actor=GroupConfig(lr=1e-9))
    recorder = fit_sft(tmp_path, module, sft_data(batch_size=7), max_epochs=1)
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2_dir)
    total, count = 0.0, 0
    for record in DEMONSTRATIONS:
        prompt = tokenizer(record["prompt"])["input_ids"]
        answer = [*tokenizer(record["response"])["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss
        total, count = total + float(loss) * len(answer), count + len(answer)
    assert recorder.rows[0].loss == pytest.approx(total / count, rel=1e-5)
    assert recorder.rows[0].tokens == count


@pytest.mark.parametrize(
    ("tiny_model_dir", "lora"),
    crossed(("gpt2", None), ("llama", LoraConfig(rank=4))),
    indirect=["tiny_model_dir"],
)
def test_a_run_resumed_at_any_step_is_the_run_that_never_stopped(tiny_model_dir, tmp_path, lora):
    """Bitwise, from the middle and from the end of an epoch, with a schedule and Adam."""
    options = {"policy": {"lora": lora}, "actor": GroupConfig(lr=1e-2, warmup=2, schedule="cosine")}
    saving = {"callbacks": [each_step(tmp_path / "ckpt")], "weights": True}
    first = fit_sft(tmp_path / "a", sft_module(tiny_model_dir, **options), sft_data(), **saving)
    losses = [row.loss for row in first.rows if row.loss is not None]
    for done in (2, 3, 5):
        saving = {"callbacks": [each_step(tmp_path / f"more{done}")], "weights": True}
        again = sft_module(tiny_model_dir, **options)
        file = tmp_path / "ckpt" / f"step={done}.ckpt"
        second = fit_sft(tmp_path / f"{done}", again, sft_data(seed=99), ckpt=file, **saving)
        assert second.read == first.read[done:]
        for ours, theirs in zip(second.weights, first.weights[done:], strict=True):
            assert equal(ours, theirs)
        assert [row.loss for row in second.rows if row.loss is not None] == losses[done:]


def test_a_run_resumed_at_the_end_of_an_epoch_is_the_same(tiny_gpt2_dir, tmp_path):
    whole = sft_module(tiny_gpt2_dir)
    fit_sft(tmp_path / "a", whole, sft_data(), max_epochs=3)
    fit_sft(tmp_path / "b", sft_module(tiny_gpt2_dir), sft_data(), max_epochs=1)
    again = sft_module(tiny_gpt2_dir)
    last = tmp_path / "b" / "checkpoints" / "last.ckpt"
    fit_sft(tmp_path / "b", again, sft_data(), max_epochs=3, ckpt=last)
    assert equal(weights_of(whole), weights_of(again))
    rows = [read_step_metrics(tmp_path / n / "metrics.jsonl", SFTStats) for n in "ab"]
    losses = [[(row.step, row.loss, row.val_loss) for row in run] for run in rows]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2}, "`batch_size`: 2, and 3 when the checkpoint was written"),
        ({"demonstrations": DEMONSTRATIONS[:5]}, "training examples: 5, and 7 when"),
        ({}, None),
    ],
)
def test_a_resume_that_reads_other_steps_is_told(tiny_gpt2_dir, tmp_path, caplog, options, message):
    saving = each_step(tmp_path / "ckpt")
    fit_sft(tmp_path / "a", sft_module(tiny_gpt2_dir), sft_data(), callbacks=[saving])
    file, again = tmp_path / "ckpt" / "step=2.ckpt", sft_module(tiny_gpt2_dir)
    more = {"callbacks": [each_step(tmp_path / "more")]}
    fit_sft(tmp_path / "b", again, sft_data(**options), ckpt=file, **more)
    trainer = sft_trainer(tmp_path / "c", **more)
    trainer.validate(again, sft_data(batch_size=1), ckpt_path=file, verbose=False)
    told = [record.getMessage() for record in caplog.records if "was written" in record.message]
    assert len(told) == (message is not None)
    assert message is None or message in told[0]


def test_a_model_with_a_short_sight_is_not_packed(tmp_path):
    """Examples longer than its window would see more than they do alone."""
    folder = build_gpt2(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 12}))
    with pytest.raises(ModelError, match="looks back 12 tokens at most"):
        fit_sft(tmp_path / "a", sft_module(folder, packing=True), sft_data())
    short = sft_data(max_tokens=12, overlong="truncate")
    fit_sft(tmp_path / "b", sft_module(folder, packing=True), short, max_epochs=1)


def test_rows_of_several_steps_survive_a_resume_in_their_middle(tiny_gpt2_dir, tmp_path):
    saving = each_step(tmp_path / "ckpt")
    options = {"log_every_n_steps": 2, "max_epochs": 2}
    first = fit_sft(
        tmp_path / "a", sft_module(tiny_gpt2_dir), sft_data(), callbacks=[saving], **options
    )
    second = fit_sft(
        tmp_path / "b",
        sft_module(tiny_gpt2_dir),
        sft_data(),
        ckpt=tmp_path / "ckpt" / "step=5.ckpt",
        callbacks=[each_step(tmp_path / "more")],
        **options,
    )
    assert [row.step for row in first.rows] == [2, 3, 3, 4, 6, 6]
    assert second.rows[0].step == 6
    assert second.rows[0].loss == first.rows[4].loss
    assert second.rows[0].examples == first.rows[4].examples


def test_dropout_of_the_folder_may_be_kept_and_still_resumes_bitwise(tmp_path):
    folder = build_gpt2(tmp_path / "m", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    saving = each_step(tmp_path / "ckpt")
    options = {"dropout": "keep", "microbatch_tokens": 30}
    whole = sft_module(folder, **options)
    first = fit_sft(tmp_path / "a", whole, sft_data(), callbacks=[saving])
    torch.rand(5)  # another state of the global generator
    again = sft_module(folder, **options)
    more = [each_step(tmp_path / "more")]
    fit_sft(
        tmp_path / "b", again, sft_data(), ckpt=tmp_path / "ckpt" / "step=4.ckpt", callbacks=more
    )
    assert equal(weights_of(whole), weights_of(again))
    silent = fit_sft(tmp_path / "c", sft_module(folder), sft_data())
    assert silent.rows[0].loss != first.rows[0].loss
    whole.export(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["resid_pdrop"] == 0.3


def test_t10_without_dropout_two_passes_are_one(tmp_path):
    folder = build_gpt2(tmp_path / "m", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    plain = build_gpt2(tmp_path / "p")
    silent = fit_sft(tmp_path / "a", sft_module(folder), sft_data())
    without = fit_sft(tmp_path / "b", sft_module(plain), sft_data())
    assert [row.loss for row in silent.rows] == [row.loss for row in without.rows]


def test_only_what_is_trained_is_saved_and_other_kinds_are_refused(tiny_gpt2_dir, tmp_path):
    module = sft_module(tiny_gpt2_dir, policy={"lora": LoraConfig(rank=2)})
    fit_sft(tmp_path / "a", module, sft_data(), max_epochs=1)
    file = tmp_path / "a" / "checkpoints" / "last.ckpt"
    saved = torch.load(file, weights_only=True)
    assert all("lora" in name for name in saved["state_dict"])
    with pytest.raises(CheckpointError, match="run of another kind"):
        sft_trainer(tmp_path / "b").fit(ppo_module(tiny_gpt2_dir), data_module(), ckpt_path=file)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gradient_clip_val": 1.0}, r"model\.init_args\.actor\.max_grad_norm"),
        ({"accumulate_grad_batches": 2}, r"model\.init_args\.microbatch_tokens"),
        ({"precision": "16-true"}, "float16 overflows"),
        ({"overfit_batches": 1}, "shuffled anew"),
        (
            {"callbacks": [ModelCheckpoint(save_on_exception=True)]},
            "save_on_exception` cannot be used with SFTModule",
        ),
        (
            {"callbacks": [EarlyStopping("val/perplexty")]},
            "did you mean `val/perplexity`",
        ),
    ],
)
def test_t43_settings_that_do_not_fit_are_refused_by_name(tiny_gpt2_dir, tmp_path, option, message):
    with pytest.raises(ConfigError, match=message):
        sft_trainer(tmp_path, **option).fit(sft_module(tiny_gpt2_dir), sft_data())


def test_trainer_settings_in_steps_keep_their_meaning(tiny_gpt2_dir, tmp_path):
    stopped = fit_sft(tmp_path / "a", sft_module(tiny_gpt2_dir), sft_data(), max_steps=4)
    assert [row.step for row in stopped.rows if row.loss is not None] == [1, 2, 3, 4]
    short = fit_sft(tmp_path / "b", sft_module(tiny_gpt2_dir), sft_data(), limit_train_batches=2)
    assert [len(read) for read in short.read] == [3, 3, 3, 3]
    often = fit_sft(
        tmp_path / "c", sft_module(tiny_gpt2_dir), sft_data(), val_check_interval=1, max_epochs=1
    )
    assert [row.step for row in often.rows if row.val_loss is not None] == [1, 2, 3]
    trial = fit_sft(tmp_path / "d", sft_module(tiny_gpt2_dir), sft_data(), fast_dev_run=True)
    assert len(trial.read) == 1
    assert not (tmp_path / "d" / "metrics.jsonl").exists()
    sane = fit_sft(
        tmp_path / "e", sft_module(tiny_gpt2_dir), sft_data(), num_sanity_val_steps=1, max_epochs=1
    )
    assert [row.step for row in sane.rows if row.val_loss is not None] == [3]


def test_a_run_stops_early_on_held_out_perplexity(tiny_gpt2_dir, tmp_path):
    stop = EarlyStopping("val/perplexity", patience=1, min_delta=1e9)
    recorder = fit_sft(
        tmp_path, sft_module(tiny_gpt2_dir), sft_data(), max_epochs=9, callbacks=[stop]
    )
    assert len(recorder.read) == 6


def test_held_out_numbers_are_those_of_all_tokens_whatever_the_batch(tiny_model_dir, tmp_path):
    found = []
    for size in (1, 2, 32):
        module, data = sft_module(tiny_model_dir), sft_data(val_batch_size=size)
        (values,) = sft_trainer(tmp_path / str(size)).validate(module, data, verbose=False)
        found.append(values)
    for values in found:
        for name in ("val/loss", "val/perplexity", "val/token_accuracy", "val/tokens"):
            assert values[name] == pytest.approx(found[0][name], rel=1e-5)
    assert found[0]["val/perplexity"] == pytest.approx(math.exp(found[0]["val/loss"]))
    (tested,) = sft_trainer(tmp_path / "t").test(
        sft_module(tiny_model_dir), sft_data(), verbose=False
    )
    assert tested["test/loss"] == pytest.approx(found[0]["val/loss"], rel=1e-5)


def test_without_held_out_demonstrations_a_fit_runs_and_test_names_the_setting(
    tiny_gpt2_dir, tmp_path
):
    recorder = fit_sft(tmp_path, sft_module(tiny_gpt2_dir), sft_data(val_demonstrations=None))
    assert all(row.val_loss is None for row in recorder.rows)
    with pytest.raises(ConfigError, match=r"`test` needs held-out .*val_demonstrations"):
        sft_trainer(tmp_path).test(
            sft_module(tiny_gpt2_dir), sft_data(val_demonstrations=None), verbose=False
        )


def test_answers_to_held_out_prompts_are_written(tiny_gpt2_dir, tmp_path):
    module = sft_module(tiny_gpt2_dir, num_texts=2)
    fit_sft(tmp_path, module, sft_data(), max_epochs=1)
    rows = rows_of(tmp_path / "samples" / "step_000003.jsonl")
    assert [row["prompt"] for row in rows] == ["a cat", "the film is"]
    assert rows[0]["demonstrated"] == " sat on the tree"
    sft_trainer(tmp_path / "p").predict(module, sft_data(val_batch_size=2))
    rows = rows_of(tmp_path / "p" / "predictions.jsonl")
    assert [row["prompt"] for row in rows] == [record["prompt"] for record in HELD_OUT]
    assert rows[0]["num_tokens"] <= 4


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_the_exported_folder_is_the_trained_model_with_its_template(tiny_gpt2_dir, tmp_path, lora):
    module = sft_module(tiny_gpt2_dir, policy={"lora": lora}, chat_template="chatml")
    fit_sft(tmp_path, module, sft_data(demonstrations=CHATS, val_demonstrations=CHATS[:1]))
    folder = tmp_path / "model"
    again = sft_module(folder)
    (values,) = sft_trainer(tmp_path / "v").validate(
        again, sft_data(val_demonstrations=CHATS[:1]), verbose=False
    )
    (before,) = sft_trainer(tmp_path / "w").validate(
        module, sft_data(val_demonstrations=CHATS[:1]), verbose=False
    )
    assert values["val/loss"] == pytest.approx(before["val/loss"], rel=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template == module.tokenizer.chat_template
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert not any("lora" in name for name in plain.state_dict())


def test_a_chat_without_a_template_ends_before_weights_are_loaded(tiny_gpt2_dir, tmp_path):
    module = sft_module(tiny_gpt2_dir)
    with pytest.raises(DataError, match="chat_template"):
        fit_sft(tmp_path, module, sft_data(demonstrations=CHATS))
    assert module.network is None


class Poison(StepRecorder):
    """Makes the loss of some steps nan."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if module.steps_done in self.steps:
            self.hook = module.network.get_output_embeddings().register_forward_hook(
                lambda _, args, out: out * torch.nan
            )

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if hasattr(self, "hook"):
            self.hook.remove()


def test_a_skipped_step_counts_as_one_of_the_run(tiny_gpt2_dir, tmp_path):
    """Or `max_steps` would add steps beyond the end of the schedule, at a rate of 0."""
    module = sft_module(tiny_gpt2_dir, actor=GroupConfig(lr=1e-3, schedule="linear"))
    poison = Poison({1, 2})
    options = {"max_steps": 4, "max_epochs": -1, "callbacks": [poison, each_step(tmp_path / "c")]}
    fit_sft(tmp_path / "a", module, sft_data(val_demonstrations=None), **options)
    assert (len(poison.read), module.steps_done) == (4, 4)
    assert len(list((tmp_path / "c").iterdir())) == 4


def test_t45_steps_that_are_not_finite_are_skipped_counted_and_end_the_run(tiny_gpt2_dir, tmp_path):
    poison = Poison({1})
    recorder = fit_sft(
        tmp_path / "a", sft_module(tiny_gpt2_dir), sft_data(), callbacks=[poison], weights=True
    )
    assert equal(recorder.weights[0], recorder.weights[1])
    assert not equal(recorder.weights[1], recorder.weights[2])
    skipped = [r.steps_skipped_nonfinite for r in recorder.rows if r.val_loss is None]
    assert skipped == [0, 1, 0, 0, 0, 0]
    module = sft_module(tiny_gpt2_dir, max_skipped_steps=2)
    with pytest.raises(UpdateError, match=r"2 optimiser steps in a row .*`actor\.lr`"):
        fit_sft(tmp_path / "b", module, sft_data(), callbacks=[Poison({0, 1, 2})])


def test_sigterm_ends_the_run_with_exit_status_143(tiny_gpt2_dir, tmp_path, capsys):
    import os
    import signal

    class Kill(StepRecorder):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if module.steps_done == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    whole = sft_module(tiny_gpt2_dir)
    fit_sft(tmp_path / "whole", whole, sft_data())
    with pytest.raises(SystemExit) as caught:
        fit_sft(tmp_path, sft_module(tiny_gpt2_dir), sft_data(), callbacks=[Kill()])
    assert caught.value.code == 143 or isinstance(caught.value, SIGTERMException)
    assert "stopped by SIGTERM in epoch 1, after 4 steps" in capsys.readouterr().err
    again = sft_module(tiny_gpt2_dir)
    fit_sft(tmp_path / "again", again, sft_data(), ckpt=tmp_path / "checkpoints" / "last.ckpt")
    assert equal(weights_of(whole), weights_of(again))


def test_an_epoch_shorter_than_the_logging_interval_is_quiet_and_logged_once(
    tiny_gpt2_dir, tmp_path
):
    options = {"log_every_n_steps": 50, "logger": CSVLogger(tmp_path)}
    recorder = fit_sft(tmp_path, sft_module(tiny_gpt2_dir), sft_data(), **options)
    assert [row.step for row in recorder.rows if row.loss is not None] == [3, 6]
