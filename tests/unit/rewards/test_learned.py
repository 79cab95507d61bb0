import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.errors import ModelError
from ppo_lightning.models import SequenceScorer
from ppo_lightning.rewards import SequenceClassifierReward, scores_of
from tests.helpers.completions import make_completions
from tests.helpers.tiny_models import build_reward_model

CPU = torch.device("cpu")
CHAT = ({"role": "user", "content": "who?"}, {"role": "assistant", "content": "the dog."})
ASK = ({"role": "user", "content": "why?"},)


def by_hand(folder, *texts, **options):
    """Score one at a time, so that no padding is near."""
    scorer = SequenceScorer.load(str(folder), **options)
    return torch.cat([scorer.score([text]) for text in texts])


def score(folder, completions, **options):
    reward = SequenceClassifierReward(str(folder), **options)
    reward.setup(CPU)
    return scores_of(reward, "learned", completions)


def test_a_plain_prompt_is_continued_by_its_response(tiny_reward_dir):
    completions = make_completions([" sat", "", " saw a bird!"], prompts=["a cat", "a", "the dog"])
    expected = by_hand(tiny_reward_dir, "a cat sat", "a", "the dog saw a bird!")
    assert_close(score(tiny_reward_dir, completions), expected, atol=1e-5, rtol=1e-5)
    assert len(set(expected.tolist())) == 3


# T23: rendered anew, with the reward model's own template and tokenizer
def test_a_chat_is_given_as_a_chat_with_the_response_as_its_last_turn(tiny_reward_dir):
    chat = (*CHAT, {"role": "user", "content": "why?"})
    completions = make_completions(
        ["so.", "because."], prompts=["why?", "why?"], messages=[chat, ASK]
    )
    # Written out with the template of the tiny reward model.
    written = ["[q]who?[a]the dog.[q]why?[a]so.", "[q]why?[a]because."]
    assert_close(
        score(tiny_reward_dir, completions),
        by_hand(tiny_reward_dir, *written),
        atol=1e-5,
        rtol=1e-5,
    )


def test_plain_prompts_can_be_made_chats(tiny_reward_dir):
    completions = make_completions(["because."], prompts=["why?"])
    assert_close(
        score(tiny_reward_dir, completions, plain_prompts="chat"),
        by_hand(tiny_reward_dir, "[q]why?[a]because."),
    )


def test_chats_and_plain_prompts_in_one_batch(tiny_reward_dir):
    completions = make_completions(["x", "because."], prompts=["a", "why?"], messages=[None, ASK])
    assert_close(
        score(tiny_reward_dir, completions),
        by_hand(tiny_reward_dir, "ax", "[q]why?[a]because."),
        atol=1e-5,
        rtol=1e-5,
    )


def test_the_response_alone(tiny_reward_dir):
    completions = make_completions(["good", ""], prompts=["why?", "why?"], messages=[ASK, None])
    assert_close(
        score(tiny_reward_dir, completions, include_prompt=False),
        by_hand(tiny_reward_dir, "good", ""),
        atol=1e-5,
        rtol=1e-5,
    )


def test_batch_size_changes_nothing(tiny_reward_dir):
    completions = make_completions(["a", "a longer one", "", "b", "猫 🐈"], prompts=[""] * 5)
    one = score(tiny_reward_dir, completions, batch_size=1)
    assert_close(score(tiny_reward_dir, completions, batch_size=4), one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"max_length": 3}, {"append_eos": True}, {"transform": "probability"}, {"dtype": "float64"}],
)
def test_settings_reach_the_scorer(tiny_reward_dir, options):
    completions = make_completions(["good dog"], prompts=[""])
    scores = score(tiny_reward_dir, completions, **options)
    assert_close(scores, by_hand(tiny_reward_dir, "good dog", **options).float())
    if "dtype" not in options:
        assert scores.item() != score(tiny_reward_dir, completions).item()


def test_one_of_several_labels(tmp_path):
    folder = build_reward_model(tmp_path, num_labels=3)
    completions = make_completions(["good"], prompts=[""])
    both = [score(folder, completions, label=label) for label in (2, "LABEL_2")]
    assert torch.equal(*both)
    assert both[0].item() != score(folder, completions, label=0).item()
    with pytest.raises(ModelError, match="`label` must name one"):
        SequenceClassifierReward(str(folder)).setup(CPU)


def test_nothing_is_loaded_before_setup_and_only_once(tiny_reward_dir):
    SequenceClassifierReward("no/such/folder")
    reward = SequenceClassifierReward(str(tiny_reward_dir))
    reward.setup(CPU)
    scorer = reward._scorer
    reward.setup(CPU)
    assert reward._scorer is scorer
    reward.close()
    assert reward._scorer is None
    with pytest.raises(ModelError):
        SequenceClassifierReward("no/such/folder").setup(CPU)


@pytest.mark.parametrize("options", [{"max_length": 0}, {"batch_size": 0}])
def test_settings_out_of_range(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        SequenceClassifierReward("folder", **options)
