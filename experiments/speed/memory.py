"""Peak memory of each stage, measured in a fresh process, beside what ``estimate`` predicts.

    python experiments/speed/memory.py --model S --variant full shared lora
    python experiments/speed/memory.py --model all --variant all > memory.jsonl

One JSON line for each model and variant: MiB above the imports, predicted over measured. Two
optimiser steps are taken: from the second on an update takes no more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as pl
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
)

from experiments.speed.ppo import memory, quieten, reset_peak
from experiments.speed.sizes import (
    BOS,
    EOS,
    PAD,
    SIZES,
    Size,
    prompts,
    word_tokenizer,
    write_models,
)
from ppo_lightning.configs import (
    BufferConfig,
    CriticConfig,
    GuardConfig,
    LoraConfig,
    PolicyConfig,
    PPOConfig,
    SamplingConfig,
)
from ppo_lightning.estimate import estimate, run_of
from ppo_lightning.modules import PPOModule
from ppo_lightning.rewards import RewardTerm, SequenceClassifierReward
from ppo_lightning.rollout import RolloutDataModule

MIB = 2**20
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


@dataclass(frozen=True)
class Variant:
    """A way of training.

    Args:
        shared: A value head on the policy's trunk.
        lora: Adapters in place of all weights.
        checkpointing: Activations are made again in the backward pass.
        microbatch_tokens: Of ``PPOConfig``.
        precision: Of the Trainer.
    """

    shared: bool = False
    lora: bool = False
    checkpointing: bool = False
    microbatch_tokens: int | None = None
    precision: str = "32-true"


VARIANTS = {
    "full": Variant(),
    "shared": Variant(shared=True),
    "lora": Variant(lora=True),
    "lora-shared": Variant(lora=True, shared=True),
    "checkpointing": Variant(checkpointing=True),
    "microbatches": Variant(microbatch_tokens=256),
    "bf16": Variant(precision="bf16-mixed"),
}

_FAMILIES: dict[str, tuple[PretrainedConfig, int]] = {
    "gpt2": (GPT2Config(vocab_size=8192, n_embd=384, n_layer=6, n_head=6, n_positions=256), 32),
    "wide": (
        LlamaConfig(
            vocab_size=48000, hidden_size=192, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
        ),
        32,
    ),
    "deep": (
        LlamaConfig(
            vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=24,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
        ),
        32,
    ),
    "grouped": (
        LlamaConfig(
            vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256,
        ),
        32,
    ),
}  # fmt: skip
"""Other models and the responses of an iteration."""

MODELS = [*SIZES, *_FAMILIES]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and predict; a process of its own for each measurement."""
    given = parser().parse_args(arguments)
    if given.measure is not None:
        measure(given.model[0], given.variant[0], Path(given.measure))
        return
    for model in MODELS if given.model == ["all"] else given.model:
        with tempfile.TemporaryDirectory() as folder:
            write(model, Path(folder))
            for variant in VARIANTS if given.variant == ["all"] else given.variant:
                print(json.dumps(compared(model, variant, Path(folder))), flush=True)


def compared(model: str, variant: str, folder: Path) -> dict[str, Any]:
    """Return peaks of one model and variant, MiB by stage: predicted, measured and their ratio."""
    command = [sys.executable, __file__, "--measure", str(folder)]
    options = ["--model", model, "--variant", variant]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        raise RuntimeError(done.stderr)
    measured = json.loads(lines[-1])
    module, data = build(model, variant, folder)
    run = run_of(
        module,
        buffer=data.buffer,
        prompt_tokens=size_of(model).prompt_len,
        precision=VARIANTS[variant].precision,
    )
    stages = estimate(run).stages
    predicted = {stage.name: stage.total / MIB for stage in stages}
    heap = {stage.name: stage.parts["libraries"] + stage.parts["heap"] for stage in stages}
    return {
        "model": model,
        "variant": variant,
        "measured": {name: round(found) for name, found in measured.items()},
        "predicted": {name: round(found) for name, found in predicted.items()},
        "tensors": {name: round(predicted[name] - heap[name] / MIB) for name in predicted},
        "ratio": {name: round(predicted[name] / measured[name], 3) for name in predicted},
    }


def measure(model: str, variant: str, folder: Path) -> None:
    """Train for two optimiser steps and print the peak of each stage, MiB above the imports."""
    torch.set_num_threads(2)
    quieten()
    stages = Stages(memory("VmRSS"))
    module, data = build(model, variant, folder)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision=VARIANTS[variant].precision,  # type: ignore[arg-type]
        max_epochs=1,
        default_root_dir=folder / "run",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[stages],
    )
    trainer.fit(module, data)


class Stages(pl.Callback):
    """Peak of the memory in each stage; ends the process after two steps.

    Args:
        imported: Memory after the imports, MiB.
    """

    def __init__(self, imported: float) -> None:
        self.imported, self.steps = imported, 0
        self.peaks: dict[str, float] = {}

    def on_train_start(self, *_: Any) -> None:
        """Everything is loaded."""
        self._note("load")

    def on_stage_start(self, trainer: Any, module: Any, name: str) -> None:
        """A stage begins."""
        if name != "update" or self.steps == 0:
            reset_peak()

    def on_stage_end(self, trainer: Any, module: Any, name: str) -> None:
        """A stage, or one step of the update, has ended."""
        self._note(name)
        self.steps += name == "update"
        if self.steps == 2:
            print(json.dumps(self.peaks), flush=True)
            os._exit(0)

    def _note(self, name: str) -> None:
        self.peaks[name] = memory("VmHWM") - self.imported


def size_of(model: str) -> Size:
    """Work of a model."""
    if model in SIZES:
        return SIZES[model]
    config, rollout = _FAMILIES[model]
    return replace(SIZES["S"], vocab=config.vocab_size, rollout=rollout)


def write(model: str, folder: Path) -> None:
    """Write policy, critic and reward of a model, with a tokenizer each."""
    if model in SIZES:
        write_models(SIZES[model], "fixed", folder)
        return
    config, _ = _FAMILIES[model]
    config.update(SPECIAL)
    tokenizer = word_tokenizer(size_of(model))
    for name in ("policy", "critic", "reward"):
        own = type(config)(**{**config.to_dict(), "num_labels": 1})
        auto: Any = AutoModelForCausalLM if name == "policy" else AutoModelForSequenceClassification
        auto.from_config(own).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def build(model: str, variant: str, folder: Path) -> tuple[PPOModule, RolloutDataModule]:
    """Make module and data; all responses are as long as they may be."""
    size, how = size_of(model), VARIANTS[variant]
    reward = SequenceClassifierReward(str(folder / "reward"), batch_size=size.rollout)
    policy = PolicyConfig(
        path=str(folder / "policy"),
        lora=LoraConfig() if how.lora else None,
        gradient_checkpointing=how.checkpointing,
    )
    separate = CriticConfig(path=str(folder / "critic"), gradient_checkpointing=how.checkpointing)
    sampling = SamplingConfig(max_new_tokens=size.response_len, min_new_tokens=size.response_len)
    module = PPOModule(
        policy,
        [RewardTerm(name="score", component=reward)],
        critic_model=CriticConfig(kind="shared") if how.shared else separate,
        sampling=sampling,
        ppo=PPOConfig(target_kl=None, microbatch_tokens=how.microbatch_tokens),
        guards=GuardConfig(advice="off"),
    )
    rows: list[Any] = [{"prompt": text} for text in prompts(size, size.rollout)]
    buffer = BufferConfig(num_prompts=size.rollout, num_minibatches=size.minibatches)
    return module, RolloutDataModule(rows, buffer=buffer, chat=False)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--model", nargs="+", choices=[*MODELS, "all"], default=["S"])
    made.add_argument("--variant", nargs="+", choices=[*VARIANTS, "all"], default=["full"])
    made.add_argument("--measure", metavar="FOLDER", help="used for the processes of its own")
    return made


if __name__ == "__main__":
    main()
