"""A stand-in for vLLM 0.30, which needs a GPU, that holds and samples from weights of its own.

The contract: what the release documents or does, and this double holds us to. Each line names the
place in the release.

Loading
 1. ``LLM(model, **kwargs)`` takes the arguments of ``LLM.__init__`` and ``EngineArgs``; others
    are a ``TypeError``. The model is a Hugging Face folder, read once. (entrypoints/llm.py)
 2. The folder's config and, without ``skip_tokenizer_init``, its tokenizer are read too.
 3. ``dtype`` is the name of one of three; ``max_lora_rank`` one of nine. (config/model.py,
    lora.py)
 4. ``max_model_len`` is by default what the config says. (config/model.py)

Weights
 5. ``collective_rpc("reload_weights", kwargs={"weights_path": folder})`` reads every
    ``*.safetensors`` of the folder; other methods are unknown to this double.
    (docs/training/layerwise.md)
 6. A name that the model does not have raises; a name that is missing only makes a line in the
    log, and the old weight stays. (v1/worker/gpu_model_runner.py, ``reload_weights``)
 7. Reloading removes all adapters. (``reset_lora_state``)
 8. Reloading leaves the prefix cache alone; prompts seen before are not read again until
    ``reset_prefix_cache()``, which says whether it could. (v1/core/block_pool.py)
 9. ``update_weight_version(text)`` and ``get_weight_version()`` keep a name.
    (entrypoints/llm.py)
10. ``sleep(level=1)`` keeps the weights; ``sleep(level=2)`` loses them. Asleep it does not
    answer. ``wake_up(tags=["weights"])`` gives room for weights, ``tags=["kv_cache"]`` for the
    cache, and ``wake_up()`` for both; weights can be reloaded once their room is there, and
    need ``enable_sleep_mode``. (docs/features/sleep_mode.md)

Adapters
11. ``LoRARequest(name, id, path)``: id at least 1; read from the folder at the first request
    with that id, never again; needs ``enable_lora`` and a rank of at most ``max_lora_rank``.
    GPT-2 takes none, and there are no kernels for float32. (lora/request.py,
    v1/worker/lora_model_runner_mixin.py, lora/ops/triton_ops/lora_shrink_op.py)

Sampling
12. ``SamplingParams`` takes its fields and no others; temperature 0 or 0.01 to 2, top_p in (0,
    1], ``stop`` needs ``detokenize``, a seed of -1 is none, min_tokens <= max_tokens.
    (sampling_params.py)
13. ``generate(prompts, sampling_params, *, use_tqdm, lora_request, ...)``: one answer a prompt,
    in order; a list of params pairs with the prompts. Prompts may be ``{"prompt_token_ids":
    ids}``.
14. An empty prompt, and one longer than ``max_model_len``, are refused.
    (v1/engine/input_processor.py)
15. Each request with a seed has random numbers of its own. (v1/sample)
16. ``logprobs=0`` returns the sampled token's alone: one dict a position, by token id.
    ``raw_logprobs`` are of the logits; ``processed_logprobs`` come after least length,
    temperature, top-k and top-p. (v1/sample/sampler.py)
17. Before ``min_tokens`` no stop token and no end token of the tokenizer is drawn, and no stop
    string is looked for. (v1/engine/detokenizer.py)
18. A stop token ends a response, is part of its ids, and gives ``finish_reason`` "stop"; so
    does the tokenizer's end token and those of the generation config unless ``ignore_eos``.
    (v1/core/sched/utils.py, ``check_stop``)
19. A stop string ends it with the token that completes it, which is part of the ids, "stop".
20. ``max_tokens``, or no room in ``max_model_len``, gives "length". Other reasons: "abort",
    "error", "repetition". (v1/engine/__init__.py)
21. A dead engine raises ``EngineDeadError`` from every call. (v1/engine/exceptions.py)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

LLM_ARGUMENTS = {
    "skip_tokenizer_init",
    "dtype",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "enforce_eager",
    "enable_sleep_mode",
    "enable_prefix_caching",
    "generation_config",
    "logprobs_mode",
    "max_model_len",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "seed",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class EngineDeadError(Exception):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above).\nmore")


@dataclass(frozen=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if self.lora_int_id < 1 or not self.lora_path:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")


@dataclass(kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 0.01 <= self.temperature <= 2:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must be less than or equal to max_tokens")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are only supported when detokenize is True.")
        self.seed = None if self.seed == -1 else self.seed


@dataclass
class Faults:
    """What goes wrong, from the next call on.

    Args:
        dead: Every call raises.
        dies_loading: Taking weights kills it.
        stuck: Answers and weights wait until this is set.
        finish_reason: Of every answer.
        version: That it says it holds, whatever it was told.
        lost: Answers that do not come back.
        overshoot: Tokens drawn after a stop string before it is seen.
    """

    dead: bool = False
    dies_loading: bool = False
    stuck: threading.Event | None = None
    finish_reason: str | None = None
    version: str | None = None
    lost: int = 0
    overshoot: int = 0


class LLM:
    """One model.

    ``LLM.made`` lists all that were started since ``install``; ``LLM.stuck`` is what goes wrong
    with those to come.
    """

    made: ClassVar[list[LLM]] = []
    stuck: ClassVar[threading.Event | None] = None

    def __init__(self, model: str, **kwargs: Any) -> None:
        unknown = set(kwargs) - LLM_ARGUMENTS
        if unknown:
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword {unknown}")
        self.options = kwargs
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[kwargs["dtype"]])
        self.tokenizer = None
        if not kwargs["skip_tokenizer_init"]:
            self.tokenizer = AutoTokenizer.from_pretrained(model)
        positions = getattr(self.model.config, "max_position_embeddings", 1 << 20)
        self.max_model_len = kwargs.get("max_model_len", positions)
        if kwargs.get("enable_lora"):
            assert kwargs["max_lora_rank"] in RANKS
            if isinstance(self.model, GPT2LMHeadModel):
                raise ValueError("GPT2LMHeadModel does not support LoRA yet.")
        self.faults = Faults(stuck=LLM.stuck)
        self.version = "default"
        self.loads: list[str] = [model]
        self.names = {
            name for file in Path(model).glob("*.safetensors") for name in load_file(file)
        }
        self.adapters: dict[int, Any] = {}
        self.adapter_loads: list[str] = []
        self.requests: list[SimpleNamespace] = []
        self.asleep: set[str] = set()
        self.sleeps: list[int] = []
        self.read: dict[Any, Tensor] = {}
        LLM.made.append(self)

    # ------------------------------------------------------------------ weights

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        self._live()
        self._hang()
        assert method == "reload_weights"
        assert set(kwargs or {}) == {"weights_path"}
        assert "weights" not in self.asleep
        folder = Path((kwargs or {})["weights_path"])
        if self.faults.dies_loading:
            self.faults.dead = True
            self._live()
        own = self.model.state_dict()
        for file in sorted(folder.glob("*.safetensors")):
            for name, value in load_file(file).items():
                if name not in own:
                    raise ValueError(f"There is no module or parameter named '{name}'")
                own[name].copy_(value)
        self.adapters.clear()
        self.loads.append(str(folder))
        return [None]

    def reset_prefix_cache(self) -> bool:
        self._live()
        self.read.clear()
        return True

    def update_weight_version(self, new_version: str) -> None:
        self._live()
        assert isinstance(new_version, str)
        self.version = new_version

    def get_weight_version(self) -> str:
        self._live()
        return self.faults.version or self.version

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._live()
        assert self.options["enable_sleep_mode"]
        self.asleep, self.sleeps = {"weights", "kv_cache"}, [*self.sleeps, level]
        self.read.clear()
        if level == 2:
            for weight in self.model.parameters():
                weight.data.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._live()
        self.asleep -= set(tags or ["weights", "kv_cache"])

    def _live(self) -> None:
        if self.faults.dead:
            raise EngineDeadError

    def _hang(self) -> None:
        if self.faults.stuck is not None:
            self.faults.stuck.wait()
            self._live()

    # ------------------------------------------------------------------ answers

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: Sequence[SamplingParams],
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[SimpleNamespace]:
        self._live()
        self._hang()
        assert not self.asleep
        assert len(prompts) == len(sampling_params)
        model = self.model if lora_request is None else self._with_adapter(lora_request)
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            assert set(prompt) == {"prompt_token_ids"}
            ids = prompt["prompt_token_ids"]
            assert all(type(id_) is int for id_ in ids)
            if not 0 < len(ids) <= self.max_model_len:
                raise ValueError(f"The decoder prompt of {len(ids)} tokens cannot be taken")
            self.requests.append(SimpleNamespace(ids=ids, params=params, lora=lora_request))
            outputs.append(_Request(self, model, ids, params, lora_request).run())
        return outputs[: len(outputs) - self.faults.lost]

    def _with_adapter(self, request: LoRARequest) -> Any:
        from peft import PeftModel

        assert self.options["enable_lora"]
        assert self.model.dtype != torch.float32
        if request.lora_int_id not in self.adapters:
            plain = AutoModelForCausalLM.from_config(self.model.config, dtype=self.model.dtype)
            plain.load_state_dict(self.model.state_dict())
            adapted = PeftModel.from_pretrained(plain, request.lora_path)
            assert adapted.peft_config["default"].r <= self.options["max_lora_rank"]
            self.adapters = {request.lora_int_id: adapted.eval()}
            self.adapter_loads.append(request.lora_path)
        return self.adapters[request.lora_int_id]


class _Request:
    """One response, token by token."""

    def __init__(
        self, llm: LLM, model: Any, ids: list[int], params: SamplingParams, lora: Any
    ) -> None:
        self.llm, self.model, self.prompt, self.params = llm, model, ids, params
        self.key = None if lora is None else lora.lora_name, tuple(ids)
        self.draws = torch.Generator()
        if params.seed is None:
            self.draws.seed()
        else:
            self.draws.manual_seed(params.seed)
        self.ids: list[int] = []
        self.logprobs: list[dict[int, Any]] = []
        eos = [] if llm.tokenizer is None else [llm.tokenizer.eos_token_id]
        self.banned = {*params.stop_token_ids, *eos}
        self.ends = {*params.stop_token_ids, *([] if params.ignore_eos else eos)}

    def run(self) -> SimpleNamespace:
        reason = None
        while reason is None:
            self._step()
            reason = self._reason()
        if reason == "string":
            for _ in range(min(self.llm.faults.overshoot, self.params.max_tokens - len(self.ids))):
                self._step()
            reason = "stop"
        answer = SimpleNamespace(
            token_ids=self.ids,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            finish_reason=self.llm.faults.finish_reason or reason,
        )
        return SimpleNamespace(prompt_token_ids=self.prompt, outputs=[answer], finished=True)

    def _step(self) -> None:
        logits = self._logits()
        processed = self._processed(logits)
        if self.params.temperature == 0:
            id_ = int(processed.argmax())
        else:
            id_ = int(torch.multinomial(processed.softmax(-1), 1, generator=self.draws))
        raw = self.llm.options["logprobs_mode"] == "raw_logprobs"
        logprob = (logits if raw else processed).log_softmax(-1)[id_]
        self.ids.append(id_)
        self.logprobs.append({id_: SimpleNamespace(logprob=float(logprob), rank=1)})

    def _logits(self) -> Tensor:
        cached = self.llm.options["enable_prefix_caching"] and not self.ids
        if cached and self.key in self.llm.read:
            return self.llm.read[self.key]
        logits: Tensor = self.model(torch.tensor([self.prompt + self.ids])).logits[0, -1].float()
        if cached:
            self.llm.read[self.key] = logits
        return logits

    def _processed(self, logits: Tensor) -> Tensor:
        params = self.params
        logits = logits.clone()
        if len(self.ids) < params.min_tokens:
            logits[list(self.banned)] = -torch.inf
        if params.temperature == 0:
            return logits
        logits /= params.temperature
        if 0 < params.top_k < len(logits):
            logits[logits < logits.topk(params.top_k).values[-1]] = -torch.inf
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits[order[before >= params.top_p]] = -torch.inf
        return logits

    def _reason(self) -> str | None:
        params = self.params
        if self.ids[-1] in self.ends:
            return "stop"
        if params.stop and len(self.ids) > params.min_tokens:
            assert self.llm.tokenizer is not None
            text = self.llm.tokenizer.decode(
                self.ids, skip_special_tokens=params.skip_special_tokens
            )
            if any(stop in text for stop in params.stop):
                return "string"
        full = len(self.prompt) + len(self.ids) >= self.llm.max_model_len
        return "length" if full or len(self.ids) == params.max_tokens else None


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.30.0") -> list[LLM]:
    """Let ``import vllm`` find the double; return the list of what is started from now on."""
    package: Any = ModuleType("vllm")
    package.__version__ = version
    package.LLM, package.SamplingParams = LLM, SamplingParams
    adapters: Any = ModuleType("vllm.lora.request")
    adapters.LoRARequest = LoRARequest
    for name, module in {
        "vllm": package,
        "vllm.lora": ModuleType("vllm.lora"),
        "vllm.lora.request": adapters,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    LLM.made, LLM.stuck = [], None
    return LLM.made
