"""Stop strings in the last tokens: what the whole text says, for less decoding."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.models import load_causal_lm, reading_of
from ppo_lightning.rollout import Decoded, NativeEngine, StopRules
from ppo_lightning.rollout.engines.stop_text import TextStops
from tests.helpers.scripted import Letters, prompt_batch
from tests.helpers.tiny_models import byte_pair_tokenizer, character_tokenizer, word_tokenizer

PIECES = ["a", "b", "to", "Stop", "do", "n't", "'s", "'", ".", "!", "\n"]
SPECIALS = ["<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in "é🛑あ".encode()]


def fast(model, decoder, specials=(), **settings):
    """A tokenizer that only decodes."""
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def numbered(symbols):
    return {symbol: i for i, symbol in enumerate(symbols)}


def byte_level():
    """All bytes, so that characters are split over tokens, and some words."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠStop", "Ġ'", "lo", "ðŁ", "Ġâ"]
    return fast(BPE(vocab=numbered(symbols), merges=[]), decoders.ByteLevel(), SPECIALS)


def byte_level_ids():
    """Bytes of a few characters, and the words."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(written, _)] = letters.pre_tokenize_str("ab S.é🛑あ\n'")
    tokenizer = byte_level()
    return [*tokenizer.convert_tokens_to_ids(list(written)), *range(256, len(tokenizer))]


def sentencepiece_like(fall_back=True):
    """As Llama's: spaces before words, bytes of what has no token, the first space cut off."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    symbols = [*PIECES, *(f"▁{piece}" for piece in PIECES), "▁", "▁▁▁▁", *BYTES]
    model = BPE(vocab=numbered(symbols), merges=[])
    whole = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return fast(model, whole if fall_back else decoders.Metaspace(), SPECIALS)


def word_pieces():
    symbols = ["[UNK]", *PIECES, "##a", "##n't", "##S", "##top", "##'"]
    model = WordPiece(vocab=numbered(symbols), unk_token="[UNK]")
    return fast(model, decoders.WordPiece("##", cleanup=True), SPECIALS)


def cleaned_up():
    symbols = ["[UNK]", *PIECES, "x", "y"]
    model = WordLevel(vocab=numbered(symbols), unk_token="[UNK]")
    return fast(model, None, SPECIALS, clean_up_tokenization_spaces=True)


class Stripped:
    """Cuts blanks off both ends of any text, as some slow tokenizers do."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def convert_tokens_to_ids(self, tokens):
        return self.inner.convert_tokens_to_ids(tokens)

    def decode(self, token_ids, *, skip_special_tokens):
        return self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens).strip()


class Counting:
    """Counts the tokens that it decodes."""

    def __init__(self, inner):
        self.inner, self.calls, self.tokens = inner, 0, 0

    def decode(self, token_ids, *, skip_special_tokens):
        self.calls, self.tokens = self.calls + 1, self.tokens + len(token_ids)
        return self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens)


TOKENIZERS = {
    "byte_pairs": byte_pair_tokenizer(),
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece_like(),
    "metaspace": sentencepiece_like(fall_back=False),
    "word_pieces": word_pieces(),
    "cleaned_up": cleaned_up(),
    "words": word_tokenizer(),
    "characters": character_tokenizer(),
    "stripped": Stripped(sentencepiece_like()),
}
IDS = {
    name: byte_level_ids() if name == "byte_level" else range(len(tokenizer))
    for name, tokenizer in TOKENIZERS.items()
}


def ends(tokenizer, ids, strings):
    """Tokens with which the whole text first contains a string, or None."""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], skip_special_tokens=True)
        if any(string in text for string in strings):
            return n
    return None


def watched(tokenizer, ids, strings):
    """The same, by what the engines ask."""
    texts, all_ids = TextStops(strings, tokenizer), torch.tensor(ids)
    asked = (n for n in range(1, len(ids) + 1) if texts.contains(0, all_ids[:n]))
    return next(asked, None)


@st.composite
def responses(draw, name):
    """Ids with long runs of a few tokens, and strings out of their text or next to it."""
    token = st.sampled_from(list(IDS[name]))
    few = st.lists(token, min_size=1, max_size=3)
    runs = st.tuples(few, st.integers(1, 30)).map(lambda run: run[0] * run[1])
    parts = draw(st.lists(st.one_of(st.lists(token, max_size=20), runs), min_size=1, max_size=8))
    ids = [i for part in parts for i in part][:160] or [IDS[name][0]]
    text = TOKENIZERS[name].decode(ids, skip_special_tokens=True) or "?"
    strings = []
    for _ in range(draw(st.integers(1, 2))):
        start = draw(st.integers(0, len(text) - 1))
        strings.append(text[start : start + draw(st.integers(1, 12))])
    return ids, strings


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tail_says_what_the_whole_text_says(name):
    @settings(max_examples=80)
    @given(responses(name))
    def check(example):
        ids, strings = example
        assert watched(TOKENIZERS[name], ids, strings) == ends(TOKENIZERS[name], ids, strings)

    check()


def assert_alike(tokenizer, symbols, string):
    """The string is found, with the last token, whatever is decoded."""
    ids = tokenizer.convert_tokens_to_ids(symbols)
    assert ends(tokenizer, ids, [string]) == len(ids)
    assert watched(tokenizer, ids, [string]) == len(ids)


def test_a_long_string_has_room():
    ids = [*[1] * 60, *[2] * 40, 3]
    assert watched(Letters(), ids, ["c" * 40 + "d", "no"]) == len(ids)


def test_quotes_are_paired_from_the_first():
    """Cleaning up takes the blanks from every other one, so where a tail begins would matter."""
    for count in range(40, 70, 2):
        assert_alike(TOKENIZERS["cleaned_up"], ["a", *["'"] * count, "x"], "' x")
        assert_alike(TOKENIZERS["cleaned_up"], ["a", *["'"] * (count + 1), "x"], "''x")


def test_what_is_broken_in_the_whole_text_is_looked_for_there():
    lead = BYTES[0]
    for count in range(10, 14):
        symbols = [*["a"] * count, lead, *BYTES[:2] * 40, "b"]
        assert_alike(TOKENIZERS["sentencepiece"], symbols, "\ufffdb")


def test_a_run_of_bytes_is_read_from_its_start():
    """Where one of them is no part of a character, all of the run are none."""
    accent, sign = BYTES[:2], BYTES[2:6]
    for count in range(10, 30):
        symbols = [*["a"] * count, *accent * 40, *sign]
        assert_alike(TOKENIZERS["sentencepiece"], symbols, "🛑")


def test_the_mark_of_a_tails_first_piece_is_not_counted_on():
    """Tokens without text leave tails that have just enough of it."""
    draw = random.Random(0)
    for _ in range(15):
        pieces = draw.choices(["##a", "</s>"], k=draw.randint(40, 80))
        symbols = ["to", "##a", "##a", "##a", *pieces, "##a", "."]
        assert_alike(TOKENIZERS["word_pieces"], symbols, "aaa.")


@pytest.mark.parametrize("blanks", [1, 60])
def test_a_string_that_shows_late_is_found(blanks):
    """Blanks at the end are cut off until a word follows, wherever the tail would begin."""
    assert_alike(TOKENIZERS["stripped"], ["a", "\n", *["▁"] * blanks, "b"], "a\n ")


def test_a_string_that_the_tail_alone_holds_is_none():
    """The first piece of a tail shows its mark, which no text has."""
    tokenizer = TOKENIZERS["word_pieces"]
    ids = tokenizer.convert_tokens_to_ids(["to", *["##a"] * 200])
    assert watched(tokenizer, ids, ["##a"]) is None


@pytest.mark.parametrize("length", [200, 800])
def test_a_step_decodes_no_more_tokens_in_a_long_response(length):
    tokenizer, stop = Counting(byte_pair_tokenizer()), "world!"
    ids = [3 + i % 26 for i in range(length)]
    assert watched(tokenizer, ids, [stop]) is None
    widest = 2 * (len(stop) + 8)
    assert tokenizer.tokens <= 1.5 * widest * length
    assert tokenizer.calls <= 1.2 * length


def test_a_page_of_quotes_costs_what_it_did():
    tokenizer = Counting(TOKENIZERS["cleaned_up"])
    quote = TOKENIZERS["cleaned_up"].convert_tokens_to_ids("'")
    assert watched(tokenizer, [quote] * 400, ["Stop"]) is None
    assert tokenizer.calls < 410


@pytest.mark.parametrize("padding_free", [False, True])
def test_the_engine_asks_for_tails(tiny_llama_dir, padding_free):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir), padding_free=padding_free))
    assert reading_of(model).takes_slots(100) == padding_free
    decoder, length = Counting(Letters()), 90
    rollout = NativeEngine().generate(
        model,
        prompt_batch([[5, 6], [7]]),
        sampling=SamplingConfig(max_new_tokens=length, stop_strings=["!"]),
        stops=StopRules(end_ids=(), pad_id=0, decoder=decoder),
        policy_version=0,
    )
    assert rollout.response_mask.sum(1).tolist() == [length, length]
    assert decoder.tokens < 0.5 * length * (length + 1)


def test_responses_do_not_share_their_tails():
    texts = TextStops(["bc"], Letters())
    assert not any(texts.contains(0, torch.full((n,), 5)) for n in range(1, 100))
    assert texts.contains(1, torch.tensor([1, 2]))


def test_only_the_rows_asked_about_are_answered():
    out = Decoded.empty(3, 4, 0, torch.device("cpu"))
    out.ids[:, :2], out.lengths[:] = torch.tensor([[1, 2], [2, 1], [1, 2]]), torch.tensor([2, 2, 1])
    texts = TextStops(["bc"], Letters())
    assert texts.ended(torch.tensor([2, 0]), out).tolist() == [False, True]
    assert texts.ended(torch.tensor([], dtype=torch.long), out).tolist() == []
