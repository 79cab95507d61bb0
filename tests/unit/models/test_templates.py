"""Chat templates that are given to a tokenizer."""

import pytest
from transformers import AutoTokenizer

from ppo_lightning.errors import ModelError
from ppo_lightning.models import use_template
from tests.helpers.tiny_models import byte_pair_tokenizer, word_tokenizer

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_chatml_ends_turns_with_the_tokenizers_own_end_token():
    tokenizer = byte_pair_tokenizer()
    use_template(tokenizer, "chatml")
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    end = "<|endoftext|>\n"
    assert text == f"<|im_start|>user\na{end}<|im_start|>assistant\nb{end}"
    opened = tokenizer.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert opened == f"<|im_start|>user\na{end}<|im_start|>assistant\n"


def test_chatml_takes_im_end_where_it_is_a_token_and_makes_it_the_end_token():
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "<unk>"
    use_template(tokenizer, "chatml")
    assert tokenizer.eos_token == "<|im_end|>"
    assert "b<|im_end|>\n" in tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_a_template_of_a_file_is_saved_with_the_tokenizer(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    tokenizer = byte_pair_tokenizer()
    use_template(tokenizer, str(path))
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.apply_chat_template(TURNS, tokenize=False) == "a<|endoftext|>b<|endoftext|>"


def test_a_template_may_be_given_as_its_text():
    tokenizer = byte_pair_tokenizer()
    use_template(tokenizer, "{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == "[a][b]"
    with pytest.raises(ModelError, match="does not render a chat"):
        use_template(tokenizer, "{% for m in messages %}")


def test_files_that_are_no_template_are_named(tmp_path):
    with pytest.raises(ModelError, match="is no file"):
        use_template(byte_pair_tokenizer(), str(tmp_path / "none.jinja"))
    path = tmp_path / "broken.jinja"
    path.write_text("{% for m in messages %}")
    with pytest.raises(ModelError, match="does not render a chat"):
        use_template(byte_pair_tokenizer(), str(path))
    path.write_bytes(b"\xff\xfe{{ 1 }}")
    with pytest.raises(ModelError, match="not UTF-8"):
        use_template(byte_pair_tokenizer(), str(path))
