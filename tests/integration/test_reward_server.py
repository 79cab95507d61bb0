"""A real server process: killed, restarted, told to stop, and PPO that hangs on it."""

import json
import logging
import os
import signal
import threading
import time

import httpx
import lightning.pytorch as pl
import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import RewardProcessing
from ppo_lightning.errors import RewardError
from ppo_lightning.modules import last_checkpoint
from ppo_lightning.rewards import HTTPReward, RewardTerm, SequenceClassifierReward, scores_of
from tests.helpers.completions import make_completions
from tests.helpers.reward_server import RewardProcess
from tests.helpers.runs import Recorder, data_module, parameters, ppo_module, trainer

CPU = torch.device("cpu")

# Pays for vowels; the process ends as if killed from outside at its n-th call.
DYING = """\
import os, signal
calls = 0
def vowels(responses, at):
    global calls
    calls += 1
    if calls == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(c in "aeiou" for c in text) - 0.05 * len(text) for text in responses]
"""

# Says that it was asked, and waits for a sign.
WAITING = """\
import pathlib, time
def wait(responses, place):
    place = pathlib.Path(place)
    (place / "asked").touch()
    while not (place / "go").exists():
        time.sleep(0.005)
    return [float(text) for text in responses]
"""


def component(folder, source, name, **arguments):
    """A file for `--component`, with a function of its own."""
    (folder / "own.py").write_text(source, encoding="utf-8")
    path = folder / f"{name}{arguments.get('at', '')}.json"
    block = {"function": f"{folder / 'own.py'}:{name}", "arguments": arguments}
    class_path = "ppo_lightning.rewards.FunctionReward"
    path.write_text(json.dumps({"class_path": class_path, "init_args": block}), encoding="utf-8")
    return path


def dying(folder, at):
    """A server that does not survive its n-th call; 0 is none."""
    path = component(folder, DYING, "vowels", at=at)
    return RewardProcess("--component", path, log=folder / "server.txt")


def test_a_reward_model_gives_the_same_scores_at_the_other_end(tiny_reward_dir, tmp_path):
    chat = ({"role": "user", "content": "why? 猫"},)
    completions = make_completions(
        ["so.", "", "a cat sat", "because."],
        prompts=["a", "b", "the dog", "why? 猫"],
        messages=[None, None, None, chat],
    )
    here = SequenceClassifierReward(str(tiny_reward_dir))
    here.setup(CPU)
    expected = scores_of(here, "here", completions)
    with RewardProcess(tiny_reward_dir, "--name", "rm", log=tmp_path / "log.txt") as process:
        assert process.said == f"ppo-lightning: `rm` is served at {process.url}\n"
        there = HTTPReward(process.url, batch_size=3)
        there.setup(CPU)
        assert there.fingerprint() == here.fingerprint() != ""
        assert_close(scores_of(there, "there", completions), expected, atol=1e-5, rtol=1e-5)
        there.close()


def test_killed_in_the_middle_of_a_request(tmp_path):
    with dying(tmp_path, at=2) as process:
        reward = HTTPReward(process.url, retries=1, backoff=0.0)
        reward.setup(CPU)
        completions = make_completions(["ae", "xyz"])
        assert_close(torch.tensor(reward(completions)), torch.tensor([1.9, -0.15]))
        with pytest.raises(RewardError, match=r"could not be asked: .*\(the last of 2 tries\)"):
            reward(completions)
        assert process.ended() == -signal.SIGKILL
        reward.close()


@pytest.mark.parametrize(("sign", "status"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_a_server_that_is_told_to_stop_answers_what_it_was_asked(tmp_path, sign, status):
    path = component(tmp_path, WAITING, "wait", place=str(tmp_path))
    found = {}
    with RewardProcess("--component", path, log=tmp_path / "log.txt") as process:
        reward = HTTPReward(process.url, retries=0)
        asking = threading.Thread(target=lambda: found.update(is_=reward(make_completions(["7"]))))
        asking.start()
        while not (tmp_path / "asked").exists():
            time.sleep(0.005)
        os.kill(process.process.pid, getattr(signal, sign))
        # It takes no more, though it still works on what it has.
        while True:
            try:
                httpx.get(process.url, trust_env=False, timeout=60)
            except httpx.TransportError:
                break
            time.sleep(0.005)
        assert found == {}
        (tmp_path / "go").touch()
        asking.join()
        reward.close()
        assert found == {"is_": [7.0]}
        assert process.ended() == status
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == ""


# PPO


def fit(model_dir, folder, url, *, epochs=4, callbacks=(), **options):
    """Train, or go on from the newest file; one request an iteration. Returns the weights."""
    pl.seed_everything(0, verbose=False)
    settings = {"retries": 1, "backoff": 0.0} | options
    reward = HTTPReward(url, **settings)
    drops = settings.get("on_failure") == "missing"
    module = ppo_module(
        model_dir,
        rewards=[RewardTerm(name="server", component=reward)],
        reward_processing=RewardProcessing(on_nonfinite="drop" if drops else "error"),
    )
    run = trainer(folder, max_epochs=epochs, callbacks=list(callbacks))
    try:
        run.fit(module, data_module(), ckpt_path=last_checkpoint(run))
    finally:
        reward.close()
    return parameters(module)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_whose_server_dies_ends_clearly_and_goes_on_as_if_nothing_had_been(
    tiny_llama_dir, tmp_path
):
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    with dying(tmp_path, at=3) as process:
        with pytest.raises(RewardError) as caught:
            fit(tiny_llama_dir, broken, process.url)
        assert process.ended() == -signal.SIGKILL
    told = str(caught.value)
    assert told.startswith(
        f"reward `server`, sample 0: the reward server `{process.url}` could not"
    )
    assert "Prompt: " in told
    assert sorted(path.name for path in (broken / "checkpoints").iterdir()) == [
        "epoch=1.ckpt",
        "last.ckpt",
    ]
    with dying(tmp_path, at=0) as process:  # another process, at another address
        resumed = fit(tiny_llama_dir, broken, process.url)
        never_stopped = fit(tiny_llama_dir, whole, process.url)
    assert resumed.keys() == never_stopped.keys()
    for name, value in never_stopped.items():
        assert resumed[name].equal(value), name


def test_a_run_goes_on_without_its_server_where_so_configured(tiny_llama_dir, tmp_path, caplog):
    seen = Recorder()
    with dying(tmp_path, at=2) as process, caplog.at_level(logging.WARNING, "ppo_lightning"):
        options = {"on_failure": "missing", "retries": 0, "callbacks": [seen]}
        with pytest.warns(UserWarning, match="no optimiser step: every response was dropped"):
            after = fit(tiny_llama_dir, tmp_path, process.url, epochs=3, **options)
        assert process.ended() == -signal.SIGKILL
    assert [int(c.result.dropped.sum()) for c in seen.collected] == [0, 8, 8]
    assert all(c.result.raw[c.result.dropped].isnan().all() for c in seen.collected)
    assert caplog.text.count("8 of 8 responses have no score") == 2
    assert all(value.isfinite().all() for value in after.values())
