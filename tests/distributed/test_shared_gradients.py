"""Ranks of one machine average gradients in shared memory: the same numbers, and nothing left."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from ppo_lightning.callbacks import SharedGradients
from ppo_lightning.distributed import average_in_shared_memory, rank, shared_mean, shared_memory
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import data_module, fit, ppo_module
from tests.helpers.sft_runs import sft_data, sft_module, sft_trainer

TINY_BUCKETS = {"bucket_cap_mb": 0.002}
CASES = {
    "one bucket": {},
    "many buckets": TINY_BUCKETS,
    "copied": {"gradient_as_bucket_view": False, **TINY_BUCKETS},
    "unused": {"find_unused_parameters": True, **TINY_BUCKETS},
}


class Net(nn.Module):
    """Three layers, one of which may be left out on some ranks, or on all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.idle = nn.Linear(3, 3)

    def forward(self, states, *, skip):
        for number, layer in enumerate(self.layers):
            states = states if skip and number == 1 else torch.tanh(layer(states))
        return states


def wrapped(dtype=torch.float32, **options):
    """A model that is the same on all ranks, under DDP."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net().to(dtype)
    if not options.get("find_unused_parameters"):
        net.idle = None
    return DistributedDataParallel(net, **{"gradient_as_bucket_view": True, **options})


def gradients_of(model, *, skips, steps=3):
    """Gradients after each of a few steps, the last of which has two backward passes in one."""
    generator = torch.Generator().manual_seed(1 + rank())
    dtype = model.module.layers[0].weight.dtype
    found = []
    for step in range(steps):
        model.zero_grad()
        states = torch.randn(4, 16, generator=generator).to(dtype)
        if step == steps - 1:
            with model.no_sync():
                model(states, skip=skips).square().sum().backward()
        model(states.flip(0), skip=skips).square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        found.append({name: None if g is None else g.tolist() for name, g in grads.items()})
    return found


def averaged(options, dtype):
    """Gradients by DDP's own way and by shared memory."""
    shared_mean.BLOCK = 100
    skips = options.get("find_unused_parameters", False) and rank_of_environment() == 1
    plain = gradients_of(wrapped(dtype, **options), skips=skips)
    assert files() == ([], 0)
    model = wrapped(dtype, **options)
    assert average_in_shared_memory(model) == ""
    return plain, gradients_of(model, skips=skips), files()


def rank_of_environment():
    return int(os.environ["RANK"])


def files():
    """Shared files of this process that have a name, and how many it sees that have none."""
    mine = [n for n in os.listdir(shared_memory.FOLDER) if n.startswith(f"torch_{os.getpid()}_")]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return mine, sum("/dev/shm/torch_" in line and "(deleted)" in line for line in maps)


@pytest.mark.parametrize(
    ("ranks", "case", "dtype"),
    [
        (2, "one bucket", torch.float32),
        (2, "many buckets", torch.bfloat16),
        (2, "copied", torch.float64),
        (3, "many buckets", torch.float32),
        (3, "unused", torch.float64),
    ],
)
def test_means_are_those_of_ddp_and_the_same_on_all_ranks(ranks, case, dtype):
    answers = run_on_ranks(averaged, ranks, CASES[case], dtype)
    # Halves are exact; thirds are rounded before the sum by DDP, and after it here.
    bounds = {"rtol": 0, "atol": 0} if ranks == 2 else {}
    for plain, shared, (named, seen) in answers:
        assert named == []
        assert seen >= ranks  # and so was used
        for mine, first, expected in zip(shared, answers[0][1], plain, strict=True):
            assert mine.keys() == expected.keys()
            for name in mine:
                assert_same(mine[name], first[name], rtol=0, atol=0)
                assert_same(mine[name], expected[name], **bounds)
    if case == "unused":
        gradients = answers[0][1][0]
        assert gradients["module.idle.weight"] is None
        assert sum(gradients["module.layers.1.bias"]) != 0  # of the ranks that used it


def assert_same(found, expected, **bounds):
    if expected is None:
        assert found is None
    else:
        assert_close(torch.tensor(found), torch.tensor(expected), **bounds)


def break_on_one(what):
    """Let the second rank, or both, be unable to share."""
    second = rank_of_environment() == 1
    if what == "no room":
        usage = SimpleNamespace(free=2**20 if second else 2**40)
        shared_memory.shutil = SimpleNamespace(disk_usage=lambda folder: usage)
    elif what == "no folder":
        shared_memory.FOLDER = "/no/such/folder"
    elif what == "machines":
        shared_memory.machine_name = lambda: f"machine {second}"
    elif what == "not opened" and second:
        shared_memory.os = SimpleNamespace(**vars(os) | {"getpid": lambda: 0})
    elif what == "others' memory" and second:
        shared_memory._open = lambda *_: torch.tensor([7])
    elif what == "system":
        shared_memory.sys = SimpleNamespace(platform="darwin")


def reason_for(what, dtype, sparse):
    break_on_one(what)
    model = wrapped(dtype)
    if sparse:
        model.module.table = nn.Embedding(3, 3, sparse=True)
    if what == "no room":
        model.module.large = nn.Linear(2**10, 2**10)
    reason = average_in_shared_memory(model)
    return reason, model._comm_hooks


@pytest.mark.parametrize(
    ("what", "dtype", "expected"),
    [
        ("no room", torch.float32, "`/dev/shm` has 1 MiB free, and they take 8"),
        ("no folder", torch.float32, "No such file or directory: '/no/such/folder'"),
        ("machines", torch.float32, "on several machines"),
        ("not opened", torch.float32, "cannot open another one's memory"),
        ("others' memory", torch.float32, "what rank 0 shares is not what others see"),
        ("system", torch.float32, "it takes Linux"),
        ("dtype", torch.float16, "a weight is torch.float16 on cpu"),
        ("sparse", torch.float32, "sparse gradients"),
    ],
)
def test_where_memory_cannot_be_shared_all_ranks_say_why(what, dtype, expected):
    answers = run_on_ranks(reason_for, 2, what, dtype, what == "sparse")
    assert answers[0] == answers[1]
    assert expected in answers[0][0]
    assert answers[0][1] == []


def shared_too_late(case):
    """The room is gone by the time that gradients are there, on the second rank."""
    plain = gradients_of(wrapped(**CASES[case]), skips=False)
    model = wrapped(**CASES[case])
    assert average_in_shared_memory(model) == ""
    ((_, state),) = model._comm_hooks

    def share(storage):
        raise RuntimeError("unable to allocate shared memory")

    if rank() == 1:
        torch.UntypedStorage._share_fd_cpu_ = share
    return plain, gradients_of(model, skips=False), state.gave_up


def test_where_buckets_cannot_be_shared_after_all_they_are_sent():
    for plain, found, gave_up in run_on_ranks(shared_too_late, 2, "many buckets"):
        assert gave_up
        for mine, expected in zip(found, plain, strict=True):
            for name in expected:
                assert_same(mine[name], expected[name], rtol=0, atol=0)


def after_a_failure():
    """A backward pass fails, on each rank after another bucket; the next is none the worse."""
    state = shared_mean.SharedMean()
    torch.distributed.init_process_group("gloo")
    buckets = [torch.full((3,), float(rank() + n)) for n in range(3)]
    for n in range(rank() + 1):
        state.take(buckets[n].clone(), is_first=n == 0, is_last=False)
    futures = [state.take(b, is_first=n == 0, is_last=n == 2) for n, b in enumerate(buckets)]
    return [future.value().tolist() for future in futures]


def test_a_backward_pass_that_failed_leaves_nothing_to_the_next():
    expected = [[0.5 + n] * 3 for n in range(3)]
    assert run_on_ranks(after_a_failure, 2) == [expected, expected]


def shared_run(model_dir, folder, kind, enabled):
    """Train; return what the trainer said, and how many buckets lay in shared memory."""
    said, seen = [], []
    logging.getLogger("lightning.pytorch").addHandler(Said(said))
    inner = shared_mean._average_blocks
    shared_mean._average_blocks = lambda blocks: seen.append(len(blocks)) or inner(blocks)
    callbacks = [] if enabled is None else [SharedGradients(enabled)]
    options = {"strategy": "ddp", "devices": 2, "callbacks": callbacks}
    if kind == "ppo":
        fit(folder, ppo_module(model_dir), data_module(), max_epochs=1, **options)
    else:
        sft_trainer(folder, max_epochs=1, **options).fit(sft_module(model_dir), sft_data())
    return len(seen), [text for text in said if "shared in memory" in text]


class Said(logging.Handler):
    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.mark.parametrize(
    ("kind", "enabled", "expected"), [("ppo", None, 4), ("sft", None, 3), ("ppo", False, 0)]
)
def test_runs_share_unless_told_otherwise(tiny_llama_dir, tmp_path, kind, enabled, expected):
    answers = run_on_ranks(shared_run, 2, tiny_llama_dir, tmp_path, kind, enabled)
    assert answers == [(expected, []), (expected, [])]


def run_without_room(model_dir, folder):
    shared_memory.FOLDER = "/no/such/folder"
    return shared_run(model_dir, folder, "ppo", None)


def test_a_run_that_cannot_share_says_so_once_and_goes_on(tiny_gpt2_dir, tmp_path):
    (first, said), (second, silent) = run_on_ranks(run_without_room, 2, tiny_gpt2_dir, tmp_path)
    assert first == second == 0
    assert silent == []
    assert len(said) == 1
    assert "No such file or directory" in said[0]
