"""What holds for every test: offline, one thread, the same examples each time, tiny models."""

import gc
import logging
import os

# Before anything imports these libraries, which read them once. Set, not defaulted: a test that
# reaches for the network must fail on every machine alike.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process would only warn about it

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Tiny tensors gain nothing from threads, and sums in one order are the same on every machine.
torch.set_num_threads(1)

# Derandomised: a red run can be repeated. No deadline: the first example often pays for an import.
settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("deterministic")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Half a million objects of the libraries stay: none is looked at for garbage, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """The command line lets the package's log be seen, and a later test may read it."""
    log = logging.getLogger("ppo_lightning")
    before = log.level, log.handlers[:]
    yield
    log.setLevel(before[0])
    log.handlers[:] = before[1]


@pytest.fixture(scope="session")
def tiny_gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 policy: absolute positions, EOS is BOS, own pad token. Read only."""
    from tests.helpers.tiny_models import build_gpt2

    return build_gpt2(tmp_path_factory.mktemp("tiny") / "gpt2")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama policy: rotary positions, own BOS, a chat template. Read only."""
    from tests.helpers.tiny_models import build_llama

    return build_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def even_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama policy whose heads can be shared out, keys and values too. Read only."""
    from tests.helpers.tiny_models import build_llama

    return build_llama(tmp_path_factory.mktemp("even") / "llama", num_key_value_heads=2)


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def tiny_model_dir(request: pytest.FixtureRequest) -> Path:
    """Each policy in turn. Read only."""
    return request.getfixturevalue(f"tiny_{request.param}_dir")


@pytest.fixture(scope="session")
def tiny_reward_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with one score, whose tokenizer and template are no policy's. Read only."""
    from tests.helpers.tiny_models import build_reward_model

    return build_reward_model(tmp_path_factory.mktemp("tiny") / "reward")
