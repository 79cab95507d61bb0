"""Chat templates for tokenizers that have none, or another one than is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ppo_lightning.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = "chatml"

_START, _END = "<|im_start|>", "<|im_end|>"
_TRIAL = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


def use_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Give a tokenizer a chat template, which is saved with it from then on.

    Args:
        tokenizer: Changed in place. With ``chatml`` its end token becomes ``<|im_end|>`` if that
            is a token of its; otherwise turns end with the end token that it has, and
            ``<|im_start|>`` is spelled in ordinary tokens.
        template: ``chatml``, the path of a Jinja file, or its text (which has braces in it).

    Raises:
        ModelError: No such file, or it is no template that renders a question and an answer.
    """
    if template == CHATML:
        if _END in tokenizer.get_vocab():
            tokenizer.eos_token = _END
        if tokenizer.eos_token is None:
            raise ModelError("`chat_template: chatml` needs a tokenizer with an end token.")
        tokenizer.chat_template = _chatml(str(tokenizer.eos_token))
        return
    tokenizer.chat_template = template if "{" in template else _read(Path(template))
    try:
        tokenizer.apply_chat_template([dict(turn) for turn in _TRIAL], tokenize=False)
    except Exception as error:  # a template is a program, and raises what it likes
        raise ModelError(
            f"`chat_template`: `{template}` does not render a chat: {first_line(error)}"
        ) from error


def _chatml(end: str) -> str:
    close = f"{{{{ {end!r} + '\\n' }}}}"
    return (
        "{% for message in messages %}"
        f"{{{{ '{_START}' + message['role'] + '\\n' + message['content'] }}}}{close}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '{_START}assistant\\n' }}}}{{% endif %}}"
    )


def _read(path: Path) -> str:
    if not path.is_file():
        raise ModelError(
            f"`chat_template`: `{path}` is no file. Give the path of a Jinja template, its text, "
            f"or `{CHATML}`."
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"`chat_template`: `{path}` is not UTF-8 text.") from error
