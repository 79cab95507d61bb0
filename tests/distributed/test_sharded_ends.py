"""What ranks with weights in shards must agree on, and where a run may end."""

import random
import shutil

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.callbacks import ActorEMA, ExportModel
from ppo_lightning.checkpointing import newest_good
from ppo_lightning.configs import LoraConfig
from ppo_lightning.distributed import from_first_peer, gathered, is_shard, peer, rank, whole
from ppo_lightning.errors import CheckpointError, RankError, RewardError
from ppo_lightning.modules import FSDP2Strategy, last_checkpoint
from ppo_lightning.rewards import Reward, RewardTerm
from tests.helpers.deaths import exit_codes
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import Recorder, data_module, fit, ppo_module, trainer


def weights_of(module):
    return {name: whole(p.detach()).numpy().copy() for name, p in module.named_parameters()}


class Moody(Reward):
    """Says something else each time, and counts how often it was asked."""

    asked = 0

    def __call__(self, completions):
        self.asked += 1
        return torch.tensor([random.SystemRandom().random() for _ in completions.responses])


def with_a_moody_reward(model_dir, folder):
    moody, judge = Moody(), Moody()
    module = ppo_module(model_dir, rewards=[RewardTerm(name="moody", component=moody)], gold=judge)
    fit(
        folder,
        module,
        data_module(val_prompts=["no"]),
        strategy=FSDP2Strategy(tensor_parallel_size=2),
        devices=2,
        max_epochs=1,
        enable_checkpointing=False,
    )
    return weights_of(module), moody.asked, judge.asked


def test_peers_get_the_same_scores_of_a_reward_that_changes_its_mind(even_llama_dir, tmp_path):
    first, second = run_on_ranks(with_a_moody_reward, 2, even_llama_dir, tmp_path)
    assert all((first[0][name] == second[0][name]).all() for name in first[0])
    assert first[1] > 0 < first[2]
    assert second[1:] == (0, 0)


class Failing(Reward):
    """Fails from a call on."""

    def __init__(self, after):
        self.left = after

    def __call__(self, completions):
        self.left -= 1
        if self.left < 0:
            raise ValueError("the judge is out")
        return torch.zeros(len(completions.responses))


def with_a_failing_reward(model_dir, folder, peers, after):
    """The reward fails; in a rollout or, one call later, in the validation that follows it."""
    rewards = [RewardTerm(name="judge", component=Failing(after))]
    module = ppo_module(model_dir, rewards=rewards)
    strategy = FSDP2Strategy(tensor_parallel_size=peers)
    data = data_module(val_prompts=["no", "you"])
    with pytest.raises((RewardError, RankError), match="the judge is out") as raised:
        fit(folder, module, data, strategy=strategy, devices=2, callbacks=[ActorEMA(decay=0.5)])
    return type(raised.value).__name__


@pytest.mark.parametrize("after", [0, 1])
def test_the_error_of_a_reward_is_told_as_it_is(even_llama_dir, tmp_path, after):
    found = run_on_ranks(with_a_failing_reward, 2, even_llama_dir, tmp_path, 1, after)
    assert found == ["RewardError", "RewardError"]


def test_a_reward_that_fails_ends_peers_too(even_llama_dir, tmp_path):
    found = run_on_ranks(with_a_failing_reward, 2, even_llama_dir, tmp_path, 2, 0)
    assert found == ["RewardError", "RankError"]


def held_out_of(model_dir, folder, peers):
    """Train with an average, then test, validate and predict from the file."""

    def run():
        strategy = FSDP2Strategy(tensor_parallel_size=peers)
        options = {"strategy": strategy, "devices": 2, "max_epochs": 1}
        return trainer(folder, callbacks=[ActorEMA(decay=0.5)], **options)

    data = {"val_prompts": ["no", "you", "yes yes"], "val_batch_size": 1}
    first = run()
    first.fit(ppo_module(model_dir), data_module(**data))
    path = last_checkpoint(first)
    found = []
    for name in ("test", "validate"):
        (scores,) = getattr(run(), name)(ppo_module(model_dir), data_module(**data), ckpt_path=path)
        found.append(next(v for k, v in scores.items() if k.endswith("greedy/score")))
    predicted = run().predict(ppo_module(model_dir), data_module(**data), ckpt_path=path)
    trained = first.callback_metrics["val/greedy/score"].item()
    return [trained, *found], sum(map(len, predicted))


@pytest.mark.parametrize(
    "peers",
    # Peers answer held-out prompts in the runs of test_sharded.py as well, if not from a file.
    [1, pytest.param(2, marks=pytest.mark.slow)],
)
def test_held_out_prompts_are_answered_by_the_average_from_a_file(even_llama_dir, tmp_path, peers):
    answered = 0
    for scores, count in run_on_ranks(held_out_of, 2, even_llama_dir, tmp_path, peers):
        assert scores[1:] == pytest.approx([scores[0]] * 2, abs=1e-6)
        answered += count
    assert answered == (6 if peers == 1 else 12)  # greedy and sampled; peers have the same


def validated_then_fitted(model_dir, folder):
    """Answer held-out prompts in inference mode, as Lightning does where NCCL connects ranks."""
    module = ppo_module(model_dir)
    strategy = FSDP2Strategy()

    class Inference(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            with torch.inference_mode(), gathered(pl_module.networks):
                pass

    recorder = Recorder()
    callbacks = [Inference(), recorder]
    run = trainer(folder, strategy=strategy, devices=2, max_epochs=1, callbacks=callbacks)
    run.fit(module, data_module())
    return [s.steps_taken for s in recorder.stats], all(map(is_shard, module.parameters()))


def test_weights_put_together_in_inference_mode_are_trained_afterwards(tiny_gpt2_dir, tmp_path):
    found = run_on_ranks(validated_then_fitted, 2, tiny_gpt2_dir, tmp_path)
    assert found == [([4.0], True)] * 2


class OwnNumber(pl.Callback):
    """Logs a metric that is better and better on one rank alone."""

    def on_train_epoch_end(self, trainer, pl_module):
        epoch = trainer.current_epoch
        trainer.callback_metrics["mine"] = torch.tensor(float(epoch if rank() == 0 else -epoch))


def exporting(model_dir, folder):
    module = ppo_module(model_dir)
    fit(
        folder,
        module,
        data_module(),
        strategy=FSDP2Strategy(),
        devices=2,
        max_epochs=2,
        callbacks=[OwnNumber(), ExportModel(str(folder / "best"), monitor="mine", mode="max")],
    )
    return (folder / "best" / "model.safetensors").is_file()


def test_the_best_is_the_first_ranks_on_all(tiny_gpt2_dir, tmp_path):
    assert run_on_ranks(exporting, 2, tiny_gpt2_dir, tmp_path) == [True, True]


class Unwritable(pl.Callback):
    """Has a state on the first rank that no file can hold."""

    def state_dict(self):
        return {"odd": lambda: None} if rank() == 0 else {}


def with_an_unwritable_state(model_dir, folder):
    strategy = FSDP2Strategy(sharded_checkpoints=True)
    module, callbacks = ppo_module(model_dir), [Unwritable()]
    with pytest.raises(CheckpointError, match=r"could not be written: .*lambda"):
        fit(folder, module, data_module(), strategy=strategy, devices=2, callbacks=callbacks)
    return [path.name for path in folder.rglob("*.ckpt*")]


def test_what_the_first_rank_cannot_write_is_every_ranks_error(tiny_gpt2_dir, tmp_path):
    assert run_on_ranks(with_an_unwritable_state, 2, tiny_gpt2_dir, tmp_path) == [[], []]


def in_one_place(model_dir, folder, parts, epochs):
    """Write `last.ckpt` into the same folder, in parts or whole."""
    keep = ModelCheckpoint(
        dirpath=folder / "files", filename="one", save_last=True, save_on_train_epoch_end=True
    )
    run = trainer(
        folder,
        callbacks=[keep],
        strategy=FSDP2Strategy(sharded_checkpoints=parts),
        devices=2,
        max_epochs=epochs,
    )
    module = ppo_module(model_dir, policy={"lora": LoraConfig(rank=2)})
    run.fit(module, data_module(), ckpt_path=last_checkpoint(run))


@pytest.mark.parametrize(
    "first",
    # Either way each takes the place of the other once at least.
    [True, pytest.param(False, marks=pytest.mark.slow)],
)
def test_files_and_folders_take_each_others_place(tiny_gpt2_dir, tmp_path, first):
    """GPT-2's embeddings are its output layer."""
    for epochs, parts in enumerate((first, not first, first), 1):
        run_on_ranks(in_one_place, 2, tiny_gpt2_dir, tmp_path, parts, epochs)
        assert (tmp_path / "files" / "last.ckpt").is_dir() == parts
        assert newest_good([tmp_path]).iterations == epochs


def test_a_run_killed_between_two_names_goes_on_from_the_former(tiny_gpt2_dir, tmp_path):
    faults = {0: "parts_between_names:4"}  # `one.ckpt` and `last.ckpt`, twice
    codes = exit_codes(in_one_place, tiny_gpt2_dir, tmp_path, True, 2, num_ranks=2, faults=faults)
    assert codes[0] == -9
    assert not (tmp_path / "files" / "last.ckpt").exists()
    shutil.rmtree(tmp_path / "files" / "one-v1.ckpt", ignore_errors=True)
    shutil.rmtree(tmp_path / "files" / "one.ckpt", ignore_errors=True)
    assert newest_good([tmp_path]).path is None
    codes = exit_codes(in_one_place, tiny_gpt2_dir, tmp_path, True, 2, num_ranks=2)
    assert codes == [0, 0]
    assert newest_good([tmp_path]).iterations == 2


def peers_of_different_minds():
    from ppo_lightning.distributed import require_alike_among_peers, use_replicas

    torch.distributed.init_process_group("gloo")
    groups = [torch.distributed.new_group([n]) for n in (0, 1)]
    use_replicas(groups[rank()], torch.distributed.group.WORLD)
    same = from_first_peer(lambda: f"of {peer()}")
    require_alike_among_peers(torch.ones(2))
    with pytest.raises(RankError, match="different responses"):
        require_alike_among_peers(torch.full((2,), float(rank())))
    return same


def test_peers_take_what_the_first_has_made_and_notice_what_differs():
    assert run_on_ranks(peers_of_different_minds, 2) == ["of 0", "of 0"]
