"""Runs that are sampled in another process, with the current weights or one update late."""

import os
import signal
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.callbacks import CheckpointRollback
from ppo_lightning.checkpointing import newest_good
from ppo_lightning.configs import LoraConfig, StalenessConfig
from ppo_lightning.errors import RolloutError
from ppo_lightning.rollout import AsyncEngine, NativeEngine
from tests.helpers.faults import Says
from tests.helpers.lagged import LaggedEngine
from tests.helpers.runs import data_module, fit, parameters, ppo_module
from tests.helpers.sampling_process import Faulty, fork_samplers, lives

VARIANTS = {
    "separate": {},
    "shared": {"critic_model": {"kind": "shared"}},
    "lora": {"policy": {"lora": LoraConfig(rank=4)}},
    "stop strings": {"sampling": {"stop_strings": ["a"], "top_k": 20, "batch_size": 3}},
}
SEVERAL = {"num_prompts": 4, "responses_per_prompt": 2, "num_tokens": 80}
STRICT = StalenessConfig(strict=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    fork_samplers(monkeypatch)


class Watch(pl.Callback):
    """Keeps the number of the process that samples, and what had been pushed after each update."""

    def __init__(self):
        self.pids, self.pushed = set(), []

    def on_update_end(self, trainer, module, stats):
        self.pids.add(module.engine.pid)
        self.pushed.append(module.engine.bytes_pushed)


HELD_OUT = ("the cat", "hello you")


def run(folder, model_dir, engine, *, ckpt=None, epochs=3, callbacks=(), **settings):
    """Fit with validation and files; returns module, recorder and the watch."""
    buffer, held_out = settings.pop("buffer", {}), settings.pop("held_out", HELD_OUT)
    module, watch = ppo_module(model_dir, engine=engine, **settings), Watch()
    keep = ModelCheckpoint(
        filename="{epoch}", save_top_k=-1, save_last=True, save_on_train_epoch_end=True
    )
    watches = [watch] if isinstance(engine, AsyncEngine) else []
    recorder = fit(
        folder,
        module,
        data_module(val_prompts=held_out and list(held_out), buffer=buffer),
        ckpt=ckpt,
        max_epochs=epochs,
        callbacks=[keep, *watches, *callbacks],
    )
    return module, recorder, watch


def same(a, b):
    ours, theirs = parameters(a), parameters(b)
    return ours.keys() == theirs.keys() and all(v.equal(theirs[n]) for n, v in ours.items())


def comparable(stats):
    return {k: v for k, v in stats.to_log().items() if k[:5] != "time/" and k != "run/memory_gib"}


BOTH = [
    ("llama", "shared"),
    ("llama", "lora"),
    ("llama", "stop strings"),
    ("gpt2", "separate"),
    pytest.param(("llama", "separate"), marks=pytest.mark.slow),  # the other family has it
]


@pytest.fixture(params=BOTH, ids="-".join)
def case(request):
    """A model's folder, and the name of a variant."""
    family, variant = request.param
    return request.getfixturevalue(f"tiny_{family}_dir"), variant


def test_waiting_for_the_current_weights_is_the_synchronous_run(case, tmp_path):
    tiny_model_dir, variant = case
    settings = VARIANTS[variant]
    plain, recorded, _ = run(tmp_path / "a", tiny_model_dir, None, **settings)
    engine = AsyncEngine(ahead=0, timeout=60)
    found, ours, _ = run(tmp_path / "b", tiny_model_dir, engine, staleness=STRICT, **settings)
    assert same(plain, found)
    assert [comparable(s) for s in ours.stats] == [comparable(s) for s in recorded.stats]


@pytest.mark.parametrize(
    "case", [("llama", "lora"), ("gpt2", "separate")], ids="-".join, indirect=True
)
def test_sampling_ahead_is_one_update_late_and_nothing_else(case, tmp_path):
    """The oracle keeps older weights in the trainer's process."""
    tiny_model_dir, variant = case
    settings = {**VARIANTS[variant], "held_out": None}
    late, recorded, _ = run(tmp_path / "a", tiny_model_dir, LaggedEngine(1), **settings)
    engine = AsyncEngine(timeout=60)
    found, ours, watch = run(tmp_path / "b", tiny_model_dir, engine, **settings)
    assert same(late, found)
    assert [s.lag_max for s in ours.stats] == [0, 1, 1]
    assert [s.lag_allowed for s in (*recorded.stats, *ours.stats)] == [0] * 3 + [1] * 3
    assert [s.policy_version for s in ours.stats] == [0, 0, 4]
    assert ours.stats[2].importance_mean == recorded.stats[2].importance_mean
    assert len(watch.pids) == 1
    assert not lives(watch.pids.pop())


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    "case",
    [
        ("llama", "lora"),
        ("gpt2", "separate"),
        # What is special here is the buffer under way, not the networks: test_resume.py has them.
        pytest.param(("llama", "shared"), marks=pytest.mark.slow),
    ],
    ids="-".join,
    indirect=True,
)
def test_resume_is_bitwise_with_a_buffer_under_way(case, tmp_path):
    """T52: from every file, the last one of a shorter run too, which trains on."""
    tiny_model_dir, variant = case
    settings = {**VARIANTS[variant], "buffer": SEVERAL}
    whole, recorded, _ = run(tmp_path / "whole", tiny_model_dir, AsyncEngine(), **settings)
    sizes = [s.num_responses for s in recorded.stats]
    assert sizes[0] == sizes[1] != sizes[2]  # the second was sized before the first was sampled
    for after in (1, 2):
        start = tmp_path / "whole/checkpoints" / f"epoch={after - 1}.ckpt"
        if after == 2:
            run(tmp_path / "short", tiny_model_dir, AsyncEngine(), epochs=2, **settings)
            start = tmp_path / "short/checkpoints/last.ckpt"
        pl.seed_everything(99, verbose=False)
        folder = tmp_path / f"resumed{after}"
        module, resumed, _ = run(folder, tiny_model_dir, AsyncEngine(), ckpt=start, **settings)
        for now, then in zip(resumed.stats, recorded.stats[after:], strict=True):
            assert comparable(now) == comparable(then)
        assert same(whole, module)
        assert module.versions.state_dict() == whole.versions.state_dict()


def test_a_file_with_a_buffer_under_way_loads_with_weights_only(tiny_llama_dir, tmp_path):
    """T56."""
    run(tmp_path, tiny_llama_dir, AsyncEngine(), epochs=1)
    content = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    ahead = content["ppo_lightning"]["ahead"]
    assert (ahead["iteration"], ahead["policy_version"]) == (1, 0)
    assert ahead["indices"].tolist() == list(range(8))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_buffer_that_answers_other_prompts_is_not_used(tiny_llama_dir, tmp_path, caplog):
    run(tmp_path / "a", tiny_llama_dir, AsyncEngine(), epochs=1)
    file = tmp_path / "a/checkpoints/last.ckpt"
    content = torch.load(file, weights_only=True)
    content["ppo_lightning"]["ahead"]["prompts"][3] += 1
    torch.save(content, file)
    _, resumed, _ = run(tmp_path / "b", tiny_llama_dir, AsyncEngine(), epochs=2, ckpt=file)
    assert "answers other prompts" in caplog.text
    assert [s.lag_max for s in resumed.stats] == [0]


@pytest.fixture(scope="module")
def whole(tiny_llama_dir, tmp_path_factory):
    """A run that nothing interrupts."""
    with pytest.MonkeyPatch.context() as patch:
        fork_samplers(patch)
        folder = tmp_path_factory.mktemp("whole")
        return run(folder, tiny_llama_dir, AsyncEngine(timeout=60))[0]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("SIGKILL", "ended while sampling: killed by SIGKILL"),
        ("SIGSTOP", r"not answered for `timeout: 2` seconds \(it is stopped, as by SIGSTOP\)"),
        ("raise", "failed while sampling: RuntimeError: the cache is full"),
    ],
)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_process_that_fails_ends_the_run_which_goes_on_bit_for_bit(
    tiny_llama_dir, tmp_path, whole, what, said
):
    again, watch = tmp_path / "again", Watch()
    engine = AsyncEngine(Faulty(what, at=3), timeout=60)

    class Hurry(pl.Callback):
        def on_update_end(self, trainer, module, stats):
            engine._process._timeout = 2  # it has started, which takes long on a busy machine

    with pytest.raises(RolloutError, match=said):
        run(again, tiny_llama_dir, engine, callbacks=[watch, Hurry()])
    assert not any(lives(pid) for pid in watch.pids)
    newest = newest_good([again / "checkpoints"])
    assert newest.iterations == 1  # the third buffer, of iteration 2, is in no file
    assert not newest.skipped
    module, _, _ = run(again, tiny_llama_dir, AsyncEngine(timeout=60), ckpt=newest.path)
    assert same(whole, module)


def test_with_adapters_the_adapters_alone_are_pushed(tiny_llama_dir, tmp_path):
    pushed = {}
    for variant in ("separate", "lora"):
        module, _, watch = run(
            tmp_path / variant, tiny_llama_dir, AsyncEngine(), epochs=2, **VARIANTS[variant]
        )
        actor = module.networks.actor
        trained = sum(p.numel() * 4 for p in actor.parameters() if p.requires_grad)
        assert watch.pushed == [2 * trained, 3 * trained]  # twice at first: this one and the next
        pushed[variant] = trained
        assert ("lora" in variant) == any("lora" in n for n, _ in actor.named_parameters())
    assert pushed["lora"] < pushed["separate"] / 4


def test_held_out_prompts_are_answered_by_the_current_weights(tiny_llama_dir, tmp_path):
    module, recorder, _ = run(tmp_path, tiny_llama_dir, AsyncEngine(), epochs=2)
    (batch,) = module.trainer.datamodule.val_dataloader()
    now = replace(module.held_out(), engine=NativeEngine())
    expected = now.answers(batch, writer="policy", config=module.validation)
    found = [a for a in recorder.answers[-1] if a.writer == "policy"]
    assert [a.response_ids for a in found] == [a.response_ids for a in expected]


def test_what_was_sampled_by_weights_that_are_undone_is_not_used(tiny_llama_dir, tmp_path):
    rollback = CheckpointRollback()
    _, recorder, _ = run(
        tmp_path,
        tiny_llama_dir,
        AsyncEngine(),
        epochs=5,
        callbacks=[Says("kl_runaway", 2), rollback],
    )
    assert rollback.num_rollbacks == 1
    assert [s.lag_max for s in recorder.stats] == [0, 1, 1, 0, 1]
    kept = torch.load(tmp_path / "checkpoints/epoch=2.ckpt", weights_only=True)
    assert kept["ppo_lightning"]["ahead"] == {}


class Raises(pl.Callback):
    def __init__(self, error):
        self.error = error

    def on_update_end(self, trainer, module, stats):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_the_process_ends_with_a_run_that_fails(tiny_llama_dir, tmp_path, error):
    watch = Watch()
    with pytest.raises((ValueError, SystemExit)):
        run(tmp_path, tiny_llama_dir, AsyncEngine(), callbacks=[watch, Raises(error)])
    assert watch.pids
    assert not any(lives(pid) for pid in watch.pids)


def test_signals_for_the_whole_group_are_the_trainers_business(tiny_llama_dir, tmp_path):
    class Signals(pl.Callback):
        def on_update_end(self, trainer, module, stats):
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(module.engine.pid, number)

    _, recorder, watch = run(tmp_path, tiny_llama_dir, AsyncEngine(), callbacks=[Signals()])
    assert len(recorder.stats) == 3
    assert len(watch.pids) == 1
