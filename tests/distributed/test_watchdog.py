"""A rank that dies, stops, fails or hangs ends the others, with a word; a slow one does not."""

import os
import signal
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.callbacks import Watchdog
from ppo_lightning.checkpointing import newest_good
from ppo_lightning.distributed import LOST_RANK, faults, pulse, rank
from ppo_lightning.modules import last_checkpoint
from ppo_lightning.rewards import Reward, RewardTerm
from tests.helpers.cli import tiny_config, write_config
from tests.helpers.deaths import exit_codes
from tests.helpers.runs import IdReward, data_module, ppo_module, trainer
from tests.helpers.sft_runs import sft_data, sft_module, sft_trainer

INTERVAL, TIMEOUT = 0.05, 4.0
KILLED = -signal.SIGKILL
RAISED = 1  # what Python leaves with after an error


def watched(timeout=TIMEOUT):
    """A watchdog; before this process is hit, both ranks have heard where the other is."""
    dog = Watchdog(timeout=timeout, interval=INTERVAL)

    def kill(pid, number):
        heart = dog._watch.heartbeat
        (other,) = {0, 1} - {rank()}
        numbers = [heart._beat.number, heart.look()[other].beat.number]

        def told(seen):
            pulse.beat()  # what is to come is no hang
            number = seen[other].beat.number
            return heart._beat.number > numbers[0] + 2 and number > numbers[1] + 2

        heart.wait_until(told, 30)
        os.kill(pid, number)

    faults.os = SimpleNamespace(environ=os.environ, getpid=os.getpid, kill=kill)
    return dog


def fit(model_dir, folder, *callbacks, rewards=None, dog=None, max_epochs=2):
    """Two iterations from the newest file there is."""
    pl.seed_everything(0, verbose=False)
    run = trainer(
        folder,
        max_epochs=max_epochs,
        strategy="ddp",
        devices=2,
        callbacks=[dog or watched(), *callbacks],
    )
    options = {} if rewards is None else {"rewards": rewards}
    run.fit(ppo_module(model_dir, **options), data_module(), ckpt_path=last_checkpoint(run))


def ended(function, folder, *arguments, faults=None):
    """Exit statuses of two ranks, and what they printed; one iteration can be resumed."""
    log = folder / "log.txt"
    log.unlink(missing_ok=True)
    codes = exit_codes(function, *arguments, num_ranks=2, faults=faults, log=log)
    return codes, log.read_text(encoding="utf-8")


PLACES = {
    "rollout": "decode:8",
    "scoring": "score:2",
    "update": "step:6",
    "sum": "sum:6",
    "checkpoint": "save:3",
}
RARE = pytest.mark.slow
DEATHS = [
    pytest.param(1, "rollout"),
    pytest.param(0, "rollout", marks=RARE),
    pytest.param(0, "scoring"),
    pytest.param(1, "scoring", marks=RARE),
    pytest.param(1, "update", marks=RARE),
    pytest.param(0, "update", marks=RARE),
    pytest.param(1, "sum"),
    pytest.param(0, "sum", marks=RARE),
    pytest.param(0, "checkpoint"),
    pytest.param(1, "checkpoint", marks=RARE),
]


@pytest.mark.parametrize(("dead", "stage"), DEATHS)
def test_t42_a_killed_rank_is_named_with_its_stage_and_the_run_can_go_on(
    tiny_llama_dir, tmp_path, dead, stage
):
    arguments = tiny_llama_dir, tmp_path
    codes, said = ended(fit, tmp_path, *arguments, faults={dead: PLACES[stage]})
    assert codes[dead] == KILLED
    assert codes[1 - dead] in (RAISED, LOST_RANK)
    assert f"rank {dead} is gone: its process (" in said
    named = "update" if stage == "sum" else stage
    assert f"ended without a word. It was in `{named}`, iteration 1, step" in said
    assert f"rank {1 - dead}: in " in said
    assert "`--ckpt_path last` goes on from" in said
    written = stage == "checkpoint" and dead == 1  # the first rank may have got further
    assert newest_good([tmp_path]).iterations in ((1, 2) if written else (1,))
    if stage == "checkpoint":
        assert ended(fit, tmp_path, *arguments)[0] == [0, 0]
        assert newest_good([tmp_path]).iterations == 2


def test_t42_a_rank_that_dies_within_a_file_leaves_the_former_one(tiny_gpt2_dir, tmp_path):
    codes, said = ended(fit, tmp_path, tiny_gpt2_dir, tmp_path, faults={0: "checkpoint_written:3"})
    assert codes[0] == KILLED
    assert "rank 0 is gone" in said
    assert "It was in `checkpoint`, iteration 1" in said
    assert newest_good([tmp_path]).iterations == 1


@pytest.mark.parametrize(
    ("stopped", "place", "stage"),
    [
        (1, "decode:2:STOP", "rollout"),
        (0, "score:1:STOP", "scoring"),
        pytest.param(1, "step:2:STOP", "update", marks=RARE),
        pytest.param(0, "sum:2:STOP", "update"),
    ],
)
def test_t42_a_stopped_rank_is_named_and_ended_within_the_timeout(
    tiny_llama_dir, tmp_path, stopped, place, stage
):
    codes, said = ended(fit, tmp_path, tiny_llama_dir, tmp_path, faults={stopped: place})
    assert codes[stopped] == KILLED
    assert codes[1 - stopped] == LOST_RANK
    assert f"rank {stopped} (process " in said
    assert "has not been heard from for" in said
    assert f"It was in `{stage}`, iteration 0" in said
    assert "No checkpoint was written yet" in said


class OnOneRank(Reward):
    """Does something on the second rank alone."""

    def __init__(self, act):
        self.act = act

    def __call__(self, completions):
        if rank() == 1:
            self.act()
        return torch.zeros(len(completions))


def broken():
    raise ValueError("the cupboard is bare")


def hangs():
    while True:
        time.sleep(0.01)


class InCallback(pl.Callback):
    def on_rollout_end(self, trainer, module, collected):
        if rank() == 1:
            broken()


def fails(model_dir, folder, where):
    """The second rank alone raises."""
    callbacks, rewards = [], None
    if where == "reward":
        rewards = [RewardTerm(name="mine", component=OnOneRank(broken))]
    elif where == "callback":
        callbacks = [InCallback()]
    else:
        from ppo_lightning.modules import PPOModule

        inner = PPOModule.training_step

        def training_step(self, batch, batch_idx):
            if rank() == 1:
                broken()
            inner(self, batch, batch_idx)

        PPOModule.training_step = training_step
    fit(model_dir, folder, *callbacks, rewards=rewards)


@pytest.mark.parametrize(
    ("where", "stage"),
    [
        ("reward", "`reward`, iteration 0"),
        pytest.param("callback", "between stages, iteration 0", marks=RARE),
        ("step", "between stages, iteration 0"),
    ],
)
def test_t42_t46_an_error_on_one_rank_is_every_ranks(tiny_llama_dir, tmp_path, where, stage):
    codes, said = ended(fails, tmp_path, tiny_llama_dir, tmp_path, where)
    assert codes == [RAISED, RAISED]
    told = said[said.index("RankError: ") :].splitlines()[0]
    assert told.startswith(f"RankError: rank 1 failed in {stage}")
    assert "the cupboard is bare" in told
    assert "rank 0: " in told


def leaves(model_dir, folder):
    rewards = [RewardTerm(name="mine", component=OnOneRank(lambda: os._exit(0)))]
    fit(model_dir, folder, rewards=rewards)


def test_t42_a_rank_that_leaves_early_is_named(tiny_llama_dir, tmp_path):
    codes, said = ended(leaves, tmp_path, tiny_llama_dir, tmp_path)
    assert codes == [RAISED, 0]
    assert "RankError: rank 1 is gone" in said


def hanging(model_dir, folder):
    fit(model_dir, folder, rewards=[RewardTerm(name="mine", component=OnOneRank(hangs))])


def test_t42_a_rank_that_hangs_is_named_with_the_line_it_hangs_in(tiny_llama_dir, tmp_path):
    codes, said = ended(hanging, tmp_path, tiny_llama_dir, tmp_path)
    assert codes[1] == LOST_RANK
    assert codes[0] in (RAISED, LOST_RANK)  # its sum may fail before its own watch ends it
    assert "rank 1 has made no progress for" in said
    assert "in `reward`, iteration 0, step 0 at distributed/test_watchdog.py:" in said
    assert "(hangs)" in said
    assert "waits for other ranks" in said


def fails_and_stays(model_dir, folder):
    """The second rank's process outlives its error, as in a notebook: no connection breaks."""
    try:
        fails(model_dir, folder, "reward")
    except Exception:
        if rank() == 0:
            raise
        deadline = time.monotonic() + 60
        while "rank 0 ends: rank 1 failed" not in (folder / "log.txt").read_text(encoding="utf-8"):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_t42_t46_an_error_ends_ranks_whose_collective_would_wait_for_ever(tiny_llama_dir, tmp_path):
    codes, said = ended(fails_and_stays, tmp_path, tiny_llama_dir, tmp_path)
    assert codes == [LOST_RANK, 0]
    assert "rank 0 ends: rank 1 failed in `reward`" in said
    assert "the cupboard is bare" in said


def slowly():
    time.sleep(TIMEOUT / 2)


def slow(model_dir, folder):
    """Each component is quicker than the timeout, all of them together are not."""
    terms = [RewardTerm(name=f"slow{n}", component=OnOneRank(slowly)) for n in range(3)]
    terms.append(RewardTerm(name="ids", component=IdReward()))
    fit(model_dir, folder, rewards=terms, max_epochs=1)


def test_a_slow_rank_that_gets_on_is_left_alone(tiny_llama_dir, tmp_path):
    codes, said = ended(slow, tmp_path, tiny_llama_dir, tmp_path)
    assert codes == [0, 0], said
    assert newest_good([tmp_path]).iterations == 1


def command(path):
    from ppo_lightning.cli.main import main

    raise SystemExit(main(["fit", "--config", str(path)]))


def test_t42_a_command_that_has_lost_a_rank_ends_with_75(tiny_llama_dir, tmp_path):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    strategy = {
        "class_path": "lightning.pytorch.strategies.DDPStrategy",
        "init_args": {"timeout": "0:05:00"},  # of the collectives
    }
    dog = {"class_path": "ppo_lightning.callbacks.Watchdog", "init_args": {"interval": INTERVAL}}
    config["trainer"] |= {"devices": 2, "strategy": strategy, "callbacks": [dog]}
    path = write_config(tmp_path / "c.yaml", config)
    codes, said = ended(command, tmp_path, path, faults={1: "step:3"})
    assert codes == [LOST_RANK, KILLED]
    (told,) = [
        line for line in said.splitlines() if line.startswith("ppo-lightning: rank 1 is gone")
    ]
    assert "iteration 1" in told
    assert "goes on from" in told
    assert "Traceback" not in said


def supervised(model_dir, folder):
    torch.manual_seed(0)
    run = sft_trainer(folder, strategy="ddp", devices=2, callbacks=[watched()])
    run.fit(sft_module(model_dir), sft_data(), ckpt_path=last_checkpoint(run))


def test_t42_a_supervised_run_names_its_killed_rank(tiny_gpt2_dir, tmp_path):
    codes, said = ended(supervised, tmp_path, tiny_gpt2_dir, tmp_path, faults={1: "step:3"})
    assert codes == [RAISED, KILLED]
    assert "rank 1 is gone" in said
    assert "It was in `update`, iteration 0, step 2" in said
