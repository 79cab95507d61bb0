"""Trainer settings that do not fit PPO are refused by name; the rest works."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from ppo_lightning.configs import LoraConfig
from ppo_lightning.errors import ConfigError, DataError, ModelError
from tests.helpers.runs import data_module, fit, ppo_module
from tests.helpers.tiny_models import build_gpt2

REFUSED = [
    ({"gradient_clip_val": 1.0}, "max_grad_norm"),
    ({"accumulate_grad_batches": 4}, "microbatch_tokens"),
    ({"max_steps": 3}, "max_epochs"),
    ({"val_check_interval": 0.5}, "check_val_every_n_epoch"),
    ({"limit_train_batches": 2}, "buffer"),
    ({"overfit_batches": 1}, "overfit_batches"),
    ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
    ({"callbacks": [ModelCheckpoint(every_n_train_steps=2)]}, "every_n_train_steps"),
    ({"callbacks": [ModelCheckpoint(save_on_train_epoch_end=False)]}, "save_on_train_epoch_end"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=lambda x: str(x)[:40])
def test_t43_t62_flags_that_cut_an_iteration_are_refused(tiny_llama_dir, tmp_path, options, named):
    module = ppo_module(tiny_llama_dir)
    with pytest.raises(ConfigError, match=named):
        fit(tmp_path, module, data_module(val_prompts=["no"]), **options)
    assert module.networks is None  # before any weight is loaded


def test_t62_fast_dev_run_is_one_whole_iteration(tiny_llama_dir, tmp_path):
    module = ppo_module(tiny_llama_dir)
    data = data_module(val_prompts=["no"])
    recorder = fit(tmp_path, module, data, fast_dev_run=True, max_epochs=None)
    assert [s.steps_taken for s in recorder.stats] == [4]
    assert recorder.stats[0].val_greedy is not None
    assert not list(tmp_path.rglob("*.ckpt"))


class StopAt(pl.Callback):
    """What `max_time` does, at a minibatch of choice."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.should_stop or batch.step == self.step


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("step", [0, 2, 3])
def test_t62_a_run_stopped_inside_an_iteration_ends_it_and_can_be_resumed(
    tiny_llama_dir, tmp_path, step
):
    held_out = {"val_prompts": ["no"]}
    first = fit(
        tmp_path, ppo_module(tiny_llama_dir), data_module(**held_out), callbacks=[StopAt(step)]
    ).stats
    assert [s.steps_taken for s in first] == [step + 1]
    assert first[0].val_greedy is not None
    file = tmp_path / "checkpoints/last.ckpt"
    rest = fit(tmp_path / "b", ppo_module(tiny_llama_dir), data_module(**held_out), ckpt=file).stats
    assert [s.iteration for s in rest] == [1, 2]


def test_t62_max_time_is_accepted(tiny_llama_dir, tmp_path):
    recorder = fit(tmp_path, ppo_module(tiny_llama_dir), data_module(), max_time="00:01:00:00")
    assert len(recorder.stats) == 3


def test_early_stopping_by_a_validation_metric(tiny_llama_dir, tmp_path):
    stop = EarlyStopping(monitor="val/greedy/response_length", patience=1, mode="max")
    recorder = fit(
        tmp_path,
        ppo_module(tiny_llama_dir, sampling={"max_new_tokens": 1}),
        data_module(val_prompts=["no"]),
        callbacks=[stop],
        max_epochs=9,
    )
    assert len(recorder.stats) == 2  # the length is always 1: no improvement


def test_t07_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(tmp_path):
    folder = build_gpt2(tmp_path / "m", n_positions=64)
    module = ppo_module(folder, sampling={"max_new_tokens": 32})
    with pytest.raises(DataError, match="`max_prompt_tokens` = 32"):
        fit(tmp_path / "r", module, data_module(prompts=["z" * 60]))
    with pytest.raises(ConfigError, match=r"\(60\).*leave 32 for a prompt"):
        fit(tmp_path / "r", module, data_module(max_prompt_tokens=60))
    with pytest.raises(ConfigError, match="leave 0 for a prompt"):
        fit(tmp_path / "r", ppo_module(folder, sampling={"max_new_tokens": 64}), data_module())
    dropped = data_module(prompts=["z" * 60, "the cat"], overlong="drop")
    fit(tmp_path / "r", module, dropped, max_epochs=1)
    assert dropped.train_set.num_dropped == 1


def test_t07_a_shorter_critic_limits_prompts_and_is_named(tmp_path):
    folders = [build_gpt2(tmp_path / str(n), n_positions=n) for n in (64, 40)]
    module = ppo_module(
        folders[0], critic_model={"path": str(folders[1])}, sampling={"max_new_tokens": 32}
    )
    assert module.max_prompt_tokens == 8
    with pytest.raises(ConfigError, match=r"`model\.init_args\.critic_model\.path`.*leave 8 for"):
        fit(tmp_path / "r", module, data_module(max_prompt_tokens=9))


def test_t20_a_critic_of_another_vocabulary_is_refused(tiny_llama_dir, tiny_gpt2_dir, tmp_path):
    module = ppo_module(tiny_llama_dir, critic_model={"path": str(tiny_gpt2_dir)})
    with pytest.raises(ModelError, match=r"`critic_model\.path`.*another one than the policy's"):
        fit(tmp_path, module, data_module())


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_t44_weights_too_coarse_to_be_trained_are_refused(tiny_llama_dir, tmp_path, kind):
    policy = {"dtype": "bfloat16"} | ({"lora": LoraConfig(rank=2)} if kind == "separate" else {})
    module = ppo_module(tiny_llama_dir, policy=policy, critic_model={"kind": kind})
    setting = {"separate": r"`critic_model\.dtype`", "shared": r"^`policy\.dtype`"}[kind]
    with pytest.raises(ConfigError, match=f"{setting}.*bfloat16.*bf16-mixed"):
        fit(tmp_path, module, data_module())
    # A frozen base in bfloat16 is fine.
    lora = {"dtype": "bfloat16", "lora": LoraConfig(rank=2)}
    critic = {"kind": kind} | ({"dtype": "float32"} if kind == "separate" else {})
    works = ppo_module(tiny_llama_dir, policy=lora, critic_model=critic)
    assert fit(tmp_path, works, data_module(), max_epochs=1).stats[0].steps_taken == 4


def test_a_stop_string_that_is_a_special_token_ends_by_its_id(tiny_llama_dir):
    module = ppo_module(tiny_llama_dir, sampling={"stop_strings": ["<|im_start|>"]})
    module.configure_model()
    start = module.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert start in module._stops().end_ids
