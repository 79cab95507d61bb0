"""Every rank asks for its own share, and no rank is left behind by one that gets no answer."""

import json
import os

import lightning.pytorch as pl
import torch

from ppo_lightning.distributed import rank
from ppo_lightning.rewards import HTTPReward, RewardTerm
from tests.helpers.deaths import exit_codes
from tests.helpers.runs import data_module, parameters, ppo_module, trainer
from tests.helpers.scripted_server import ScriptedServer, body, reply


def vowels(wire, request):
    found = [sum(c in "aeiou" for c in item["response"]) for item in request.items]
    wire.send(reply(json.dumps({"scores": found}).encode()))
    return True


def fit(model_dir, folder, urls):
    """Two iterations on two ranks, each with an address of its own; they leave their weights."""
    pl.seed_everything(0, verbose=False)
    reward = HTTPReward(urls[int(os.environ["RANK"])], retries=1, backoff=0.0)
    module = ppo_module(model_dir, rewards=[RewardTerm(name="server", component=reward)])
    run = trainer(folder, max_epochs=2, strategy="ddp", devices=2)
    run.fit(module, data_module())
    torch.save(parameters(module), folder / f"final{rank()}.pt")


def test_each_rank_asks_about_its_own_responses(tiny_llama_dir, tmp_path):
    with ScriptedServer(vowels) as first, ScriptedServer(vowels) as second:
        urls = [first.url, second.url]
        assert exit_codes(fit, tiny_llama_dir, tmp_path, urls, num_ranks=2) == [0, 0]
    assert [len(r.items) for r in first.requests] == [4, 4]
    assert [len(r.items) for r in second.requests] == [4, 4]
    one, other = (torch.load(tmp_path / f"final{i}.pt") for i in (0, 1))
    assert all(value.equal(other[name]) for name, value in one.items())


def test_a_rank_without_an_answer_ends_the_others_too(tiny_llama_dir, tmp_path):
    """The second rank's server breaks down in the second iteration."""
    log = tmp_path / "log.txt"
    with ScriptedServer(vowels) as good, ScriptedServer(vowels, body("", status=500)) as bad:
        urls = [good.url, bad.url]
        codes = exit_codes(fit, tiny_llama_dir, tmp_path, urls, num_ranks=2, log=log)
    assert None not in codes  # none had to be killed
    assert 0 not in codes
    said = log.read_text(encoding="utf-8")
    assert f"reward `server`, sample 0: the reward server `{bad.url}` answered 500" in said
    assert not list(tmp_path.glob("final*.pt"))
