"""Options of a learned reward: device, template, batches, and what its folder says."""

import json
import shutil

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.errors import ConfigError, ModelError
from ppo_lightning.models import SequenceScorer
from ppo_lightning.models.card import make_card, write_card
from ppo_lightning.rewards import SequenceClassifierReward, scores_of
from tests.helpers.completions import make_completions
from tests.helpers.tiny_models import build_reward_model

CPU = torch.device("cpu")
ASK = ({"role": "user", "content": "why?"},)
ASKED = make_completions(["because.", "so"], prompts=["why?", "why?"], messages=[ASK, None])


def score(folder, completions=ASKED, **options):
    reward = SequenceClassifierReward(str(folder), **options)
    reward.setup(CPU)
    return scores_of(reward, "learned", completions)


def by_hand(folder, *texts, **options):
    scorer = SequenceScorer.load(str(folder), **options)
    return torch.cat([scorer.score([text]) for text in texts])


def with_settings(folder, **settings):
    build_reward_model(folder)
    write_card(folder, make_card(folder, kind="reward", source=None, settings=settings))
    return folder


# ----------------------------------------------------------------------- the folder's settings


def test_the_folder_says_how_its_model_was_trained(tmp_path):
    """T23: asked in another way than it was trained, a reward model answers something else."""
    folder = with_settings(
        tmp_path, plain_prompts="chat", append_eos=True, max_length=9, num_pairs=120
    )
    options = {"append_eos": True, "max_length": 9}
    expected = by_hand(folder, "[q]why?[a]because.", "[q]why?[a]so", **options)
    assert_close(score(folder), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(score(folder), by_hand(folder, "[q]why?[a]because.", "[q]why?[a]so"))


@pytest.mark.parametrize(
    ("kind", "said"), [("sft", "is an SFT model, which"), ("ppo", "is a model that PPO")]
)
def test_a_model_that_answers_is_no_reward(tiny_llama_dir, tmp_path, kind, said):
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "run" / "model")
    write_card(folder, make_card(folder, kind=kind, source=None, settings={}))
    reward = SequenceClassifierReward(str(folder.parent))
    with pytest.raises(ModelError, match=f"{said}.* answers and does not score.*RewardModule"):
        reward.setup(CPU)


def test_the_responses_alone_if_the_folder_says_so(tmp_path):
    folder = with_settings(tmp_path, include_prompt=False)
    expected = by_hand(folder, "because.", "so")
    assert_close(score(folder), expected, atol=1e-5, rtol=1e-5)


def test_the_users_own_settings_come_first(tmp_path):
    folder = with_settings(
        tmp_path, plain_prompts="chat", append_eos=True, max_length=3, include_prompt=False
    )
    found = score(
        folder, plain_prompts="text", append_eos=False, max_length=100, include_prompt=True
    )
    expected = by_hand(folder, "[q]why?[a]because.", "why?so")
    assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_without_a_card_the_defaults_hold(tiny_reward_dir):
    expected = by_hand(tiny_reward_dir, "[q]why?[a]because.", "why?so")
    assert_close(score(tiny_reward_dir), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"append_eos": "yes"}, "`append_eos` must be true or false, got 'yes'"),
        ({"plain_prompts": "chats"}, "`plain_prompts` must be one of text, chat, got 'chats'"),
        ({"max_length": 0}, "`max_length` must be at least 1"),
        ({"max_length": "many"}, "ppo_lightning.json"),
    ],
)
def test_settings_that_nobody_can_mean(tmp_path, settings, message):
    folder = with_settings(tmp_path, **settings)
    with pytest.raises(ModelError, match=message) as error:
        score(folder)
    assert str(folder) in str(error.value)


def test_a_card_that_is_no_card(tmp_path):
    folder = with_settings(tmp_path)
    (folder / "ppo_lightning.json").write_text(json.dumps({"kind": "reward"}), encoding="utf-8")
    with pytest.raises(ModelError, match="no card that this version can read"):
        score(folder)


# ------------------------------------------------------------------------------------ template

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}{% endfor %}"
)


@pytest.mark.parametrize("given_as", ["text", "file"])
def test_a_template_of_ones_own(tiny_reward_dir, tmp_path, given_as):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    given = TEMPLATE if given_as == "text" else str(file)
    expected = by_hand(tiny_reward_dir, "[u]why?[a]because.", "why?so")
    assert_close(score(tiny_reward_dir, chat_template=given), expected, atol=1e-5, rtol=1e-5)


def test_a_template_that_is_nowhere(tiny_reward_dir):
    with pytest.raises(ConfigError, match=r"`chat_template`: there is no file `none\.jinja`"):
        score(tiny_reward_dir, chat_template="none.jinja")


# ------------------------------------------------------------------------------ device and batches


def test_auto_is_the_runs_device_and_a_name_is_that_one(tiny_reward_dir):
    for device, expected in (("auto", "meta"), ("cpu", "cpu")):
        reward = SequenceClassifierReward(str(tiny_reward_dir), device=device)
        reward.setup(torch.device("meta"))
        assert reward._scorer.model.device.type == expected


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "mps", ""])
def test_a_device_that_is_none(device):
    with pytest.raises(ValueError, match="`device` must be auto, cpu, cuda or cuda:NUMBER"):
        SequenceClassifierReward("folder", device=device)


def test_a_device_that_this_machine_lacks(tiny_reward_dir):
    number = torch.cuda.device_count() + 7
    with pytest.raises(ConfigError, match=f"`device: cuda:{number}` of a reward: this machine has"):
        score(tiny_reward_dir, device=f"cuda:{number}")


@pytest.mark.gpu
def test_on_a_gpu_beside_a_run_on_the_cpu(tiny_reward_dir):
    for quantization in (None, "int8"):
        here = score(tiny_reward_dir, device="cpu", quantization=quantization)
        there = score(tiny_reward_dir, device="cuda:0", quantization=quantization)
        assert_close(there, here, atol=1e-3, rtol=1e-3)


def test_batches_keep_to_their_tokens(tiny_reward_dir):
    texts = ["a" * n for n in (1, 3, 3, 4, 8, 20)]
    scorer = SequenceScorer.load(str(tiny_reward_dir), batch_tokens=9)
    # Padded, 3 · 3 are the nine; 4 and 8 would be 16; 20 is more than any batch may have.
    assert list(scorer._batches([1, 3, 3, 4, 8, 20])) == [[0, 1, 2], [3], [4], [5]]
    scorer.batch_size = 2
    assert list(scorer._batches([20, 3, 3, 4, 1])) == [[4, 1], [2, 3], [0]]
    assert list(scorer._batches([])) == []
    completions = make_completions(texts, prompts=[""] * 6)
    one = score(tiny_reward_dir, completions, batch_size=1)
    for tokens in (1, 9, 1000):
        found = score(tiny_reward_dir, completions, batch_tokens=tokens)
        assert_close(found, one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_any_dtype(tiny_reward_dir, dtype):
    assert_close(score(tiny_reward_dir, dtype=dtype), score(tiny_reward_dir), atol=0.1, rtol=0.1)


def test_eight_bits(tiny_reward_dir):
    found, exact = score(tiny_reward_dir, quantization="int8"), score(tiny_reward_dir)
    assert_close(found, exact, atol=0.1, rtol=0.1)
    assert not torch.equal(found, exact)
    with pytest.raises(ValueError, match="`quantization` must be int8, nf4 or null, got 'int4'"):
        SequenceClassifierReward("folder", quantization="int4")
    with pytest.raises(ValueError, match="`batch_tokens`"):
        SequenceClassifierReward("folder", batch_tokens=0)


@pytest.mark.parametrize("other", [{"quantization": "int8"}, {"device": "cpu"}])
def test_shards_go_with_no_other_place(other):
    with pytest.raises(ValueError, match="`shard` goes with neither `quantization` nor `device`"):
        SequenceClassifierReward("unused", shard=True, **other)
