"""Measure what callbacks, guards and logging cost, with all of them on.

    python experiments/stability/overhead.py                 # a minute or two; prints a table

One run at size M of the speed benchmark (14 million parameters for each network, 32 responses of 64
tokens to prompts of 32, four passes in four minibatches). Every hook of every callback, every guard
and everything that measures and logs is wrapped in a clock of processor time; a call inside a call
is counted once. The share is theirs of the whole iteration's processor time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import ppo_lightning.modules.collection as collection
import ppo_lightning.modules.update_steps as update_steps
import ppo_lightning.modules.updater as updater
from ppo_lightning import callbacks as ours
from ppo_lightning.configs import BufferConfig, GuardConfig, PolicyConfig, SamplingConfig
from ppo_lightning.modules import PPOModule
from ppo_lightning.rewards import RewardTerm, TargetLengthReward
from ppo_lightning.rollout import RolloutDataModule

VOCABULARY, HIDDEN, LAYERS, INNER = 4096, 384, 6, 1024
PROMPT, RESPONSE, RESPONSES, MINIBATCHES = 32, 64, 32, 4


class Clock:
    """Adds up processor time by name; time inside an inner call belongs to the outermost one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of ``owner.attribute`` under ``name``."""
        setattr(owner, attribute, self.timed(getattr(owner, attribute), name))

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the function with its time taken."""

        def call(*args: Any, **options: Any) -> Any:
            if self._inside:
                return function(*args, **options)
            self._inside, start = True, time.process_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds[name] += time.process_time() - start
                self._inside = False

        return call

    def watch_callback(self, callback: pl.Callback) -> None:
        """Time every hook of a callback."""
        for name in dir(type(callback)):
            if name.startswith("on_") or name in ("state_dict", "load_state_dict"):
                self.wrap(callback, name, type(callback).__name__)

    def watch_module(self, module: PPOModule) -> None:
        """Time guards, measurement and logging of the module."""
        self.wrap(update_steps, "log_iteration", "logging")
        self.wrap(updater, "report_of", "guards")
        self.wrap(collection, "finite_scores", "guards")
        for name in ("add_rollout", "add_step", "stats", "time_stats"):
            self.wrap(module.ledger, name, "measurement")
        module.updater.self_check = self.timed(module.updater.self_check, "guards")  # type: ignore


class Stopwatch(pl.Callback):
    """Takes the processor time of whole iterations, and starts the clocks after the first."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds, self.iterations = clock, 0.0, 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put clocks on the other callbacks."""
        for callback in trainer.callbacks:
            if callback is not self:
                self.clock.watch_callback(callback)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure with the second iteration: the first warms up."""
        if trainer.current_epoch == 1:
            self.clock.watch_module(pl_module)
            self.clock.seconds.clear()
            self._began = time.process_time()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the watch."""
        self.seconds = time.process_time() - self._began
        self.iterations = trainer.current_epoch - 1


def build_model(folder: Path) -> None:
    """Write a Llama of size M with a word tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=LAYERS,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def everything() -> list[pl.Callback]:
    """Every callback that a stable run may have."""
    return [
        ours.AdaptiveKL(),
        ours.MaxKL(max_kl_ref=50.0),
        ours.EntropyTarget(relative=0.6),
        ours.BufferScheduler(),
        ours.CheckpointRollback(),
        ours.ActorEMA(),
        ours.MetricsFile(),
        ours.SampleTexts(),
        ours.StageProgress(),
        ModelCheckpoint(filename="{epoch}", save_last="link", save_on_train_epoch_end=True),
    ]


def run(folder: Path, iterations: int) -> tuple[Clock, Stopwatch]:
    """Train with everything on."""
    model = folder / "model"
    build_model(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2 * RESPONSES, PROMPT), generator=generator)
    prompts = [" ".join(f"w{i}" for i in row) for row in ids.tolist()]
    module = PPOModule(
        policy=PolicyConfig(path=str(model)),
        rewards=[RewardTerm(name="length", component=TargetLengthReward(target_tokens=32))],
        sampling=SamplingConfig(max_new_tokens=RESPONSE),
        guards=GuardConfig(advice="off"),
    )
    buffer = BufferConfig(num_prompts=RESPONSES, num_minibatches=MINIBATCHES)
    data = RolloutDataModule(prompts, chat=False, buffer=buffer, seed=0)
    clock = Clock()
    watch = Stopwatch(clock)
    trainer = pl.Trainer(
        max_epochs=iterations + 1,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        enable_model_summary=False,
        callbacks=[watch, *everything()],
    )
    trainer.fit(module, data)
    return clock, watch


def table(clock: Clock, watch: Stopwatch) -> str:
    """Lay the shares out, the largest first."""
    lines = ["| part | processor ms an iteration | share |", "| --- | --- | --- |"]
    for name, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        each = 1000 * seconds / watch.iterations
        lines.append(f"| {name} | {each:.1f} | {seconds / watch.seconds:.2%} |")
    total = sum(clock.seconds.values())
    whole = 1000 * watch.seconds / watch.iterations
    lines.append(f"| **all of them** | {1000 * total / watch.iterations:.1f} of {whole:.0f} | ")
    return "\n".join(lines) + f"**{total / watch.seconds:.2%}** |"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=6)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(table(*run(Path(folder), given.iterations)))


if __name__ == "__main__":
    main()
