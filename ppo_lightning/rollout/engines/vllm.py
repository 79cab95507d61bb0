"""vLLM as an engine: fast sampling on a GPU, with the weights in hand sent before each rollout."""

from __future__ import annotations

from typing import Literal

from torch import nn
from typing_extensions import override

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.distributed import world_size
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollout.engines.base import BatchedEngine, Decoded, StopRules
from ppo_lightning.rollout.engines.vllm_process import import_vllm
from ppo_lightning.rollout.engines.vllm_requests import (
    TEMPERATURES,
    decoded,
    logprobs_mode,
    rules_tokens_out,
    sampling_params,
    token_prompts,
)
from ppo_lightning.rollout.engines.vllm_sync import SyncedVLLM, VLLMSettings, can_be_written
from ppo_lightning.rollout.engines.vllm_weights import adapter_rank, check_weights
from ppo_lightning.types import PromptBatch, Rollout


class VLLMEngine(BatchedEngine):
    """Sample with vLLM (extra ``vllm``), in a run of one process.

    It is started with the first rollout and holds a copy of the weights. Before each rollout it is
    sent those of the model in hand if anything in them has changed; where the policy has an
    adapter, the adapter alone. So ``policy_version`` is that of the weights that sampled: after
    weights that could not be sent it answers no more.

    The seed of a response is made of its key, and does not depend on its neighbours; vLLM's sums
    do, in their last bits, unless ``VLLM_BATCH_INVARIANT=1`` is set. Log-probabilities of greedy
    answers are those at temperature 1.

    Args:
        gpu_memory_utilization: Share of the GPU's memory for vLLM's weights and cache, in (0, 1];
            the trainer needs the rest.
        max_model_len: Most tokens of prompt and response; None is what the model's config says.
        tensor_parallel_size: GPUs that the model is spread over.
        dtype: Of weights and activations; ``auto`` is that of the trainer's forward pass.
        enforce_eager: No CUDA graphs: starts sooner, decodes slower.
        sleep_level: What memory is freed after a rollout: 1 moves the weights to the CPU and drops
            the cache, 2 drops both, so that all weights are sent again; None keeps everything.
        merge_adapter: Send merged weights instead of the adapter, as is done in float32 anyway, for
            families whose adapters vLLM does not run. In a coarse dtype merging loses the last bits
            of what was learned.
        timeout_s: Seconds that one change of weights, or all answers to a rollout, may take.
        weights_folder: Where weights are written on their way, with room for all of them; None
            takes shared memory.
    """

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        enforce_eager: bool = False,
        sleep_level: Literal[1, 2] | None = None,
        merge_adapter: bool = False,
        timeout_s: float = 1800.0,
        weights_folder: str | None = None,
    ) -> None:
        self.settings = VLLMSettings(
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            enforce_eager=enforce_eager,
            sleep_level=sleep_level,
            merge_adapter=merge_adapter,
            timeout_s=timeout_s,
            weights_folder=weights_folder,
        )
        self._rank = 0
        self._synced: SyncedVLLM | None = None

    @override
    def check(self, model: nn.Module) -> None:
        """Refuse a missing package, several processes, and weights that cannot be sent."""
        import_vllm()
        if world_size() > 1:
            raise ConfigError(
                f"`VLLMEngine` samples for one process, and this run has {world_size()}: set "
                "`trainer.devices: 1`. vLLM takes more GPUs by its `tensor_parallel_size`."
            )
        check_weights(model)
        self._rank = adapter_rank(model)

    @override
    def temperatures(self, sampling: SamplingConfig) -> tuple[float, float]:
        """Keep to the configured one where tokens are ruled out; see ``logprobs_mode``."""
        configured = sampling.temperature
        return (configured, configured) if rules_tokens_out(sampling) else TEMPERATURES

    @override
    def generate(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        policy_version: int,
        greedy: bool = False,
    ) -> Rollout:
        if len(prompts):
            self._check_lengths(prompts, sampling)
            self._vllm(model, sampling).give(model, stops.decoder, policy_version)
        rollout = super().generate(
            model,
            prompts,
            sampling=sampling,
            stops=stops,
            policy_version=policy_version,
            greedy=greedy,
        )
        if len(prompts):
            self._vllm(model, sampling).process.sleep()
        return rollout

    @override
    def decode_batch(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        greedy: bool,
    ) -> Decoded:
        """Ask for all responses at once: vLLM makes batches of its own."""
        vllm = self._vllm(model, sampling)
        params = sampling_params(
            import_vllm().SamplingParams,
            prompts.keys,
            sampling=sampling,
            stops=stops,
            greedy=greedy,
            watched=bool(sampling.stop_strings) and can_be_written(stops.decoder),
        )
        outputs = vllm.process.answer(token_prompts(prompts), params, **vllm.request_options)
        return decoded(outputs, prompts, sampling=sampling, stops=stops)

    def _vllm(self, model: nn.Module, sampling: SamplingConfig) -> SyncedVLLM:
        """Return the one vLLM of this engine.

        Raises:
            ConfigError: It was made to return other log-probabilities than this sampling wants.
        """
        mode = logprobs_mode(sampling)
        if self._synced is None:
            rank = max(self._rank, adapter_rank(model))
            self._synced = SyncedVLLM(self.settings, rank=rank, logprobs_mode=mode)
        if mode != self._synced.logprobs_mode:
            raise ConfigError(
                "`sampling.top_k`, `top_p` or `min_new_tokens`: this engine has sampled with other "
                "ones, and a vLLM returns log-probabilities either before or after tokens are "
                "ruled out. Give each setting an engine of its own."
            )
        return self._synced

    def _check_lengths(self, prompts: PromptBatch, sampling: SamplingConfig) -> None:
        """Refuse prompts that vLLM would refuse, or answer only in part.

        Raises:
            ConfigError: Says which setting.
        """
        lengths, room = prompts.prompt_mask.sum(1), self.settings.max_model_len
        if not lengths.all():
            raise ConfigError("vLLM answers no empty prompt: each needs at least one token.")
        needed = int(lengths.max()) + sampling.max_new_tokens
        if room is not None and needed > room:
            raise ConfigError(
                f"`max_model_len` of the engine is {room}, and the longest prompt with "
                f"`sampling.max_new_tokens` needs {needed}: raise it, or take shorter prompts."
            )
