"""Write the exactly solvable problem as files that a training run can be pointed at."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.exact.models import Family
from tests.helpers.exact.problem import make_problem
from tests.helpers.exact.task import EOS, FIRST_CONTENT, PAD, VOCAB_SIZE

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"


@dataclass(frozen=True, kw_only=True)
class ExportedProblem:
    """Where :func:`export_problem` put things.

    Args:
        model: Hugging Face folder: the reference and its tokenizer.
        prompts: JSONL of ``{"prompt": "t3 t5"}``.
    """

    model: Path
    prompts: Path


def prompt_text(ids: tuple[int, ...]) -> str:
    """Text of content tokens: ``(3, 5)`` is ``"t3 t5"``."""
    return " ".join(f"t{token}" for token in ids)


def prompt_ids(text: str) -> tuple[int, ...]:
    """Inverse of :func:`prompt_text`."""
    return tuple(int(word.removeprefix("t")) for word in text.split())


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of the words ``t2`` ... ``t7``; any other word is an error, not a token."""
    words = {f"t{token}": token for token in range(FIRST_CONTENT, VOCAB_SIZE)}
    vocabulary = {PAD_TOKEN: PAD, EOS_TOKEN: EOS, **words}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
    )


def export_problem(
    folder: str | Path, seed: int = 0, family: Family = "phi", *, copies: int = 1
) -> ExportedProblem:
    """Export reference, tokenizer and prompts.

    Args:
        folder: Gets ``model/`` and ``prompts.jsonl``; made if missing.
        seed: The problem's seed.
        family: Architecture of the reference.
        copies: How often the four prompts are listed, for loaders that want a full batch.
    """
    problem = make_problem(seed, family)
    paths = ExportedProblem(model=Path(folder) / "model", prompts=Path(folder) / "prompts.jsonl")
    paths.model.mkdir(parents=True, exist_ok=True)
    problem.reference.save_pretrained(paths.model)
    word_tokenizer().save_pretrained(paths.model)
    lines = [json.dumps({"prompt": prompt_text(prompt)}) for prompt in problem.task.prompts]
    paths.prompts.write_text("\n".join(lines * copies) + "\n", encoding="utf-8")
    return paths
