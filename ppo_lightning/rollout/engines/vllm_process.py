"""One running vLLM: how it is started, given weights and asked, and what is said when it fails.

Written for the release series ``RELEASE``; ``docs/how-to/vllm.md`` lists what is relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from ppo_lightning.errors import ConfigError, RewardError, RolloutError, first_line
from ppo_lightning.rewards.deadline import call_within
from ppo_lightning.rewards.extras import import_extra

T = TypeVar("T")

RELEASE = "0.30"
"""The interface of vLLM changes between releases."""

_WAY_OUT = (
    "Its own log, above, says more. The run goes on from its last checkpoint with "
    "`--ckpt_path last`; where memory ran out, lower `gpu_memory_utilization` or set `sleep_level`."
)


def import_vllm(module: str = "vllm") -> Any:
    """Import a module of vLLM, of the release that is known.

    Raises:
        ConfigError: It is not installed, or another release is.
    """
    known = {"package": "vllm", "extra": "vllm", "needed_by": "VLLMEngine"}
    version = import_extra("vllm", **known).__version__
    if not version.startswith(f"{RELEASE}."):
        raise ConfigError(
            f"`VLLMEngine` is written for vLLM {RELEASE}, and {version} is installed: "
            "pip install 'ppo-lightning[vllm]'."
        )
    return import_extra(module, **known)


class VLLMProcess:
    """A vLLM that answers while it lives: after a failure it is asked nothing any more.

    Args:
        folder: Model to begin with, a Hugging Face folder.
        tag: Name of its weights.
        timeout_s: Most seconds for a change of weights or for all answers to one call.
        sleep_level: How it sleeps; None leaves it awake.
        options: Other arguments of ``vllm.LLM``.

    Raises:
        RolloutError: It does not start.
    """

    def __init__(
        self,
        folder: Path,
        tag: str,
        *,
        timeout_s: float,
        sleep_level: Literal[1, 2] | None,
        options: Mapping[str, Any],
    ) -> None:
        self._timeout_s = timeout_s
        self._sleep_level = sleep_level
        self._asleep = False
        self._failure: str | None = None
        self._tag = ""
        kind = import_vllm().LLM
        # Starting has a time limit of vLLM's own, and wants the main thread.
        self._llm = self._tried("start", lambda: kind(model=str(folder), **options))
        self._in_time("start", lambda: self._mark_weights(tag))

    @property
    def is_empty(self) -> bool:
        """Whether it has slept its weights away."""
        return self._asleep and self._sleep_level == 2

    def load(self, folder: Path, tag: str) -> None:
        """Take new weights of the same model.

        Args:
            folder: With the weights; another one each time.
            tag: Name of these weights.
        """
        self._in_time("take the weights", lambda: self._load(folder, tag))

    def answer(
        self, prompts: Sequence[Mapping[str, list[int]]], params: Sequence[Any], **options: Any
    ) -> list[Any]:
        """Answer prompts with the weights that were last given.

        Args:
            prompts: Token ids.
            params: A ``vllm.SamplingParams`` for each.
            options: Of ``LLM.generate``.

        Raises:
            RolloutError: It fails, takes too long, or has other weights.
        """
        return self._in_time("answer", lambda: self._answer(prompts, params, options))

    def sleep(self) -> None:
        """Free the memory that it is allowed to free; called again, it sleeps on."""
        level = self._sleep_level
        if level is not None and not self._asleep:
            self._in_time("sleep", lambda: self._llm.sleep(level=level))
            self._asleep = True

    def _load(self, folder: Path, tag: str) -> None:
        if self._asleep:  # room for the weights alone: the cache is made when they are in
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._mark_weights(tag)

    def _mark_weights(self, tag: str) -> None:
        """Name the weights, and forget what was computed with those before."""
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM kept the prompts that it had read with the weights before.")
        self._llm.update_weight_version(tag)
        self._tag = tag

    def _answer(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        params: Sequence[Any],
        options: Mapping[str, Any],
    ) -> list[Any]:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        held = self._llm.get_weight_version()
        if held != self._tag:
            raise RolloutError(f"vLLM holds the weights `{held}`, and `{self._tag}` were given.")
        answers: list[Any] = self._llm.generate(prompts, params, use_tqdm=False, **options)
        return answers

    def _in_time(self, what: str, call: Callable[[], T]) -> T:
        def limited() -> T:
            try:
                return call_within(call, seconds=self._timeout_s, name=what)
            except RewardError as error:  # the deadline's own; vLLM knows no such error
                raise TimeoutError(f"not done in `timeout_s: {self._timeout_s:g}`") from error

        return self._tried(what, limited)

    def _tried(self, what: str, call: Callable[[], T]) -> T:
        """Call something of vLLM, once; say what failed and what to do.

        Raises:
            RolloutError: It failed now, or before.
        """
        if self._failure is not None:
            raise RolloutError(self._failure)
        try:
            return call()
        except Exception as error:
            kind = "" if isinstance(error, RolloutError) else f"{type(error).__name__}: "
            reason = f"{kind}{first_line(error)}".rstrip(".")
            self._failure = f"vLLM could not {what}: {reason}. {_WAY_OUT}"
            raise RolloutError(self._failure) from error
