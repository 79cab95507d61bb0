import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ppo_lightning.data import RawPrompt, render, tokenize
from ppo_lightning.errors import DataError
from tests.helpers.tiny_models import byte_pair_tokenizer, character_tokenizer, word_tokenizer

SYSTEM = {"role": "system", "content": "you are good"}
USER = {"role": "user", "content": "hello dog"}
ASSISTANT = {"role": "assistant", "content": "yes"}
MIXED = "مرحبا، 你好，שלום 👩‍🚀🇫🇷 ñ"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: whatever can be written has ids."""
    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def chat(*turns, **options):
    return RawPrompt(messages=turns, **options)


def plain(text, **options):
    return RawPrompt(prompt=text, **options)


@pytest.mark.parametrize("tokenizer", [word_tokenizer(), character_tokenizer()])
@pytest.mark.parametrize("turns", [(USER,), (SYSTEM, USER, ASSISTANT, USER)])
def test_t08_chat_ids_are_those_of_the_template_in_one_step(tokenizer, turns):
    ids = tokenize(render(chat(*turns), tokenizer), tokenizer)
    whole = tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, tokenize=True)
    assert ids == whole["input_ids"]


@pytest.mark.parametrize("with_bos", [True, False])
def test_t08_exactly_one_bos_for_chats_and_plain_strings(with_bos):
    # The tokenizer sets BOS before every text; its template writes BOS, or does not.
    tokenizer = word_tokenizer()
    if not with_bos:
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
    for raw in (chat(SYSTEM, USER), plain("hello dog"), plain("<s> hello dog")):
        ids = tokenize(render(raw, tokenizer, chat=False), tokenizer)
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_t08_no_bos_where_the_tokenizer_sets_none():
    # GPT-2's has a BOS token, which is its EOS, and puts it nowhere.
    tokenizer = byte_pair_tokenizer()
    record = render(plain("hello dog"), tokenizer)
    assert tokenizer.bos_token_id not in tokenize(record, tokenizer)
    assert tokenize(record, tokenizer) == tokenizer("hello dog")["input_ids"]


def test_end_token_that_a_tokenizer_appends_is_no_part_of_the_prompt():
    tokenizer = word_tokenizer()
    specials = [("<s>", tokenizer.bos_token_id), ("<|im_end|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=specials
    )
    assert tokenizer("dog")["input_ids"][-1] == tokenizer.eos_token_id  # the trap is set
    ids = tokenize(render(plain("the dog"), tokenizer, chat=False), tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "the", "dog"]


@pytest.mark.parametrize("as_chat", [True, False])
def test_t05_every_script_survives_rendering_and_tokens(as_chat):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    record = render(plain(MIXED), tokenizer, chat=as_chat)
    assert record.prompt == record.text == MIXED
    ids = tokenize(record, tokenizer)
    assert len(ids) == len(MIXED.encode())
    assert tokenizer.decode(ids) == MIXED


def test_plain_string_stays_as_it_is():
    raw = plain(" the dog", metadata={"answer": 1}, origin="p:1")
    record = render(raw, word_tokenizer(), chat=False)
    assert (record.prompt, record.text, record.messages) == (" the dog", " the dog", None)
    assert (record.metadata, record.origin) == ({"answer": 1}, "p:1")


@pytest.mark.parametrize(("wrap", "wrapped"), [("auto", True), (True, True), (False, False)])
def test_plain_string_becomes_a_user_turn_as_set(wrap, wrapped):
    record = render(plain("hello dog"), word_tokenizer(), chat=wrap)
    assert record.prompt == "hello dog"
    assert record.messages == ((USER,) if wrapped else None)
    assert record.text.endswith("<|im_start|> assistant ") is wrapped


def test_auto_leaves_plain_strings_to_a_tokenizer_without_template():
    assert render(plain("hello"), byte_pair_tokenizer(), chat="auto").messages is None


def test_chat_shows_its_last_user_turn_as_the_prompt():
    tool = {"role": "tool", "content": "4"}
    record = render(chat(SYSTEM, USER, ASSISTANT, {"role": "user", "content": "why"}, tool), TOKENS)
    assert record.prompt == "why"
    assert record.messages is not None
    assert len(record.messages) == 5


def test_system_prompt_opens_chats_that_have_no_system_turn():
    given = {"chat": True, "system_prompt": "you are bad"}
    assert render(plain("hello dog"), TOKENS, **given).messages == (
        {"role": "system", "content": "you are bad"},
        USER,
    )
    assert render(chat(SYSTEM, USER), TOKENS, **given).messages == (SYSTEM, USER)


TOKENS = word_tokenizer()


def error(raw, tokenizer, **options):
    with pytest.raises(DataError) as caught:
        render(raw, tokenizer, **options)
    return str(caught.value)


@pytest.mark.parametrize("raw", [plain("hi", origin="p:3"), chat(USER, origin="p:3")])
def test_chat_without_a_template_is_refused_by_record(raw):
    said = error(raw, byte_pair_tokenizer(), chat=True)
    assert said.startswith("p:3: ")
    assert "no chat template" in said


def test_a_plain_string_without_a_template_is_not_called_a_chat():
    said = error(plain("hi", origin="p:3"), byte_pair_tokenizer(), chat=True)
    assert said.startswith("p:3: `chat: true` makes a chat of this plain string")


def test_system_prompt_that_nothing_would_read_is_refused():
    said = error(plain("hi", origin="p:3"), TOKENS, chat=False, system_prompt="be good")
    assert said.startswith("p:3: `system_prompt` needs a chat")


def test_template_that_refuses_a_chat_is_named_by_record():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert error(chat(USER, origin="p:9"), tokenizer).startswith("p:9: the chat template refuses")
    assert "roles must alternate" in error(chat(USER), tokenizer)
