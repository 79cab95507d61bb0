"""Keep a vLLM at the weights of the model that is in hand."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal
from weakref import finalize

import torch
from torch import nn

from ppo_lightning.configs.checks import require, require_at_least, require_fields, require_positive
from ppo_lightning.errors import ConfigError, RolloutError, first_line
from ppo_lightning.models import base_causal_lm
from ppo_lightning.rollout.engines.base import Decoder
from ppo_lightning.rollout.engines.vllm_process import VLLMProcess, import_vllm
from ppo_lightning.rollout.engines.vllm_weights import GivenWeights, KnownModel

_SHARED_MEMORY = Path("/dev/shm")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM makes room for
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, kw_only=True)
class VLLMSettings:
    """What ``VLLMEngine`` was told; its documentation says what it means."""

    gpu_memory_utilization: float
    max_model_len: int | None
    tensor_parallel_size: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    enforce_eager: bool
    sleep_level: Literal[1, 2] | None
    merge_adapter: bool
    timeout_s: float
    weights_folder: str | None

    def __post_init__(self) -> None:
        require_fields(self)
        share = self.gpu_memory_utilization
        require(0 < share <= 1, f"`gpu_memory_utilization` must lie in (0, 1], got {share}.")
        require_at_least("max_model_len", self.max_model_len, 2)
        require_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        require_positive("timeout_s", self.timeout_s)


class SyncedVLLM:
    """A vLLM, and what it was last given.

    Args:
        settings: Of the engine.
        rank: Highest rank of an adapter that will travel; 0 if none will.
        logprobs_mode: Which log-probabilities vLLM returns.
    """

    def __init__(self, settings: VLLMSettings, *, rank: int, logprobs_mode: str) -> None:
        self.settings = settings
        self.logprobs_mode = logprobs_mode
        self._rank = rank
        self._merges = settings.merge_adapter
        self._process: VLLMProcess | None = None
        self._known: KnownModel | None = None
        self._dtype = torch.float32
        self._work = Path(mkdtemp(prefix="ppo-lightning-", dir=_place(settings)))
        finalize(self, shutil.rmtree, self._work, ignore_errors=True)
        self._num_sent = 0
        self._held: tuple[object, ...] = ()
        self._held_adapter: tuple[object, ...] = ()
        self._lora_request: Any = None

    @property
    def process(self) -> VLLMProcess:
        """The vLLM itself, once it has been given weights."""
        assert self._process is not None
        return self._process

    @property
    def request_options(self) -> dict[str, Any]:
        """What every request says besides: the adapter that it is answered with."""
        return {} if self._lora_request is None else {"lora_request": self._lora_request}

    def give(self, model: nn.Module, decoder: Decoder | None, policy_version: int) -> None:
        """Send what has changed since the last time: of a policy with an adapter, that alone.

        Args:
            model: Causal language model of transformers, also with an adapter.
            decoder: Tokenizer to begin with.
            policy_version: Of the weights.

        Raises:
            RolloutError: They cannot be written, or vLLM does not take them.
            ModelError: They are another model's.
        """
        if self._known is None:
            self._dtype = self._chosen_dtype(base_causal_lm(model))
            # vLLM has no kernels for adapters in float32, where merging rounds nothing away.
            self._merges |= self._dtype == torch.float32
        given = GivenWeights.of(model, merge_adapter=self._merges)
        held = given.base_mark(policy_version)
        fresh = self._process is None or self._process.is_empty or held != self._held
        if fresh:
            self._give_base(given, decoder, f"{policy_version}.{self._num_sent}")
            self._held, self._lora_request = held, None
        if given.adapter is None:
            self._lora_request = None
            return
        held_adapter = given.adapter_mark(policy_version)
        if self._lora_request is None or held_adapter != self._held_adapter:
            self._give_adapter(given)
            self._held_adapter = held_adapter

    def _give_base(self, given: GivenWeights, decoder: Decoder | None, tag: str) -> None:
        first = self._known is None
        if self._known is None:
            self._known = KnownModel.of(given)
        self._known.require_same(given)
        tokenizer = decoder if first and can_be_written(decoder) else None
        with self._new_folder() as folder:
            given.write_base(folder, tokenizer, self._dtype)
        if self._process is None:
            options = self._options(skip_tokenizer_init=tokenizer is None)
            self._process = VLLMProcess(
                folder,
                tag,
                timeout_s=self.settings.timeout_s,
                sleep_level=self.settings.sleep_level,
                options=options,
            )
        else:
            self._process.load(folder, tag)
        for file in folder.glob("*.safetensors"):
            file.unlink()

    def _give_adapter(self, given: GivenWeights) -> None:
        """Name a new adapter: vLLM reads it with the first request, and never again."""
        if self._lora_request is not None:
            shutil.rmtree(self._lora_request.lora_path, ignore_errors=True)
        with self._new_folder() as folder:
            given.write_adapter(folder)
        kind = import_vllm("vllm.lora.request").LoRARequest
        self._lora_request = kind(folder.name, self._num_sent, str(folder))

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """Lend a folder that was not there before.

        Raises:
            RolloutError: Something cannot be written.
        """
        self._num_sent += 1
        folder = self._work / str(self._num_sent)
        try:
            yield folder
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise RolloutError(
                f"the weights cannot be written for vLLM: {first_line(error)}. Let the engine's "
                "`weights_folder` name a place with room for all of them."
            ) from error

    def _options(self, *, skip_tokenizer_init: bool) -> dict[str, Any]:
        settings = self.settings
        options: dict[str, Any] = {
            "skip_tokenizer_init": skip_tokenizer_init,
            "dtype": _DTYPES[self._dtype],
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "enforce_eager": settings.enforce_eager,
            "enable_sleep_mode": settings.sleep_level is not None,
            "enable_prefix_caching": True,
            "generation_config": "vllm",  # not the folder's
            "logprobs_mode": self.logprobs_mode,
        }
        if settings.max_model_len is not None:
            options["max_model_len"] = settings.max_model_len
        if self._rank and not self._merges:
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(self._rank)}
        return options

    def _chosen_dtype(self, base: nn.Module) -> torch.dtype:
        """The one that was set, or that of the trainer's forward pass.

        Raises:
            ConfigError: vLLM has no such dtype.
        """
        if self.settings.dtype != "auto":
            return next(d for d, name in _DTYPES.items() if name == self.settings.dtype)
        weight = next(base.parameters())
        device = weight.device.type
        mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if mixed else weight.dtype
        if dtype not in _DTYPES:
            raise ConfigError(
                f"`dtype` of the engine: vLLM does not compute in {dtype}, as the policy does; "
                f"set one of {', '.join(_DTYPES.values())}."
            )
        return dtype


def room_for(rank: int) -> int:
    """Return the least rank that vLLM makes room for and an adapter fits in.

    Raises:
        ConfigError: It fits in none.
    """
    for room in _RANKS:
        if rank <= room:
            return room
    raise ConfigError(
        f"`lora.rank` {rank}: vLLM runs adapters of rank {_RANKS[-1]} at most; set the engine's "
        "`merge_adapter`."
    )


def can_be_written(decoder: Decoder | None) -> bool:
    """Whether a tokenizer has files that vLLM can read."""
    return hasattr(decoder, "save_pretrained")


def _place(settings: VLLMSettings) -> Path | None:
    """Where weights are written: a folder that may be made, or shared memory, if there is any."""
    if settings.weights_folder is not None:
        place = Path(settings.weights_folder)
        place.mkdir(parents=True, exist_ok=True)
        return place
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
