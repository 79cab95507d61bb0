"""FlashAttention over packed rows: the bounds it is given, with a double of the kernel."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from ppo_lightning.configs import PolicyConfig
from ppo_lightning.models import attention, attention_cuda, load_causal_lm
from ppo_lightning.models.attention import Packing, attend
from ppo_lightning.models.layout import TokenLayout
from ppo_lightning.models.scoring import policy_logprobs
from ppo_lightning.types import Sequences


def one_by_one(query, key, value, queries, keys, most_q, most_k, *, scale, window_size, enable_gqa):
    """As ``varlen_attn``: the last query of a sequence stands at its last key."""
    left, right = window_size
    assert right == 0
    assert queries.dtype == keys.dtype == torch.int32
    found = []
    for n in range(len(queries) - 1):
        q = query[queries[n] : queries[n + 1]]
        k, v = (x[keys[n] : keys[n + 1]] for x in (key, value))
        assert len(q) <= most_q
        assert len(k) <= most_k
        at = torch.arange(len(q))[:, None] + len(k) - len(q)
        places = torch.arange(len(k))
        seen = (places <= at) & ((left < 0) | (places >= at - left))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        found.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
            )[0].transpose(0, 1)
        )
    return torch.cat(found)


@pytest.fixture
def calls(monkeypatch):
    """Let packed rows on the CPU go to the double, and count what comes there."""
    seen = []

    def kernel(*arguments, **settings):
        seen.append((arguments, settings))
        return one_by_one(*arguments, **settings)

    monkeypatch.setattr(attention, "_goes_in_turn", lambda *_: False)
    monkeypatch.setattr(attention, "takes_varlen", lambda *_: True)
    monkeypatch.setattr(attention_cuda, "kernel", lambda: kernel)
    return seen


def heads(count, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(1, count, tokens, 8, dtype=torch.float64, generator=generator)
    return made.requires_grad_()


def attended(packing, tokens, kv_heads, **settings):
    """Output, and the gradients of query, key and value."""
    given = [heads(4, tokens, 0), heads(kv_heads, tokens, 1), heads(kv_heads, tokens, 2)]
    seen, _ = attend(torch.nn.Identity(), *given, None, packing=packing, **settings)
    weights = torch.randn(seen.shape, dtype=seen.dtype, generator=torch.Generator().manual_seed(3))
    return seen, *torch.autograd.grad((seen * weights).sum(), given)


def shared_prompt():
    """Two responses, of 2 and 1 tokens, to one prompt of 3, and one of 2 to another of 1."""
    sequences = Sequences(
        prompt_ids=torch.tensor([[5, 6, 7], [5, 6, 7], [0, 0, 8]]),
        prompt_mask=torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 1]]).bool(),
        response_ids=torch.tensor([[9, 10, 11], [12, 13, 0], [14, 15, 16]]),
        response_mask=torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool(),
    )
    packing = TokenLayout.of(sequences, packed=True).inputs.packing
    assert packing.tokens is not None
    return packing, 3 + 2 + 1 + 3


def packings():
    yield Packing.of(torch.tensor([4, 1, 3])), 8
    yield Packing.of(torch.tensor([3, 3])), 6
    yield shared_prompt()


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind", range(3))
def test_the_kernel_says_what_the_padded_grid_says(request, kind, kv_heads, window):
    packing, tokens = list(packings())[kind]
    settings = {"scaling": 0.3, "sliding_window": window}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_goes_in_turn", lambda *_: False)
        expected = attended(packing, tokens, kv_heads, **settings)
    calls = request.getfixturevalue("calls")
    found = attended(packing, tokens, kv_heads, **settings)
    assert len(calls) == 1
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=0, atol=1e-12)


def test_shared_tokens_are_queries_once(calls):
    packing, tokens = shared_prompt()
    attended(packing, tokens, 2)
    (query, key, *_), _ = calls[0]
    assert len(query) == tokens
    assert len(key) == sum(packing.lengths) == tokens + 3


def test_layers_share_the_bounds(calls, tiny_llama_dir, monkeypatch):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    calls.clear()  # those that found out how it may be read
    made = []
    of = attention_cuda.Bounds.of
    monkeypatch.setattr(
        attention_cuda.Bounds, "of", lambda *given: made.append(given) or of(*given)
    )
    sequences = Sequences(
        prompt_ids=torch.tensor([[5, 6], [7, 8]]),
        prompt_mask=torch.tensor([[1, 1], [0, 1]]).bool(),
        response_ids=torch.tensor([[9, 10], [11, 12]]),
        response_mask=torch.ones(2, 2).bool(),
    )
    found = policy_logprobs(model, sequences, temperature=1.0).logprobs
    assert len(made) == 1
    assert len(calls) == model.config.num_hidden_layers > 1
    monkeypatch.setattr(attention, "takes_varlen", lambda *_: False)
    expected = policy_logprobs(model, sequences, temperature=1.0).logprobs
    assert_close(found, expected, rtol=0, atol=1e-5)


def test_queries_are_of_the_dtype_of_products(calls):
    packing = Packing.of(torch.tensor([2, 1]))
    given = [torch.randn(1, 2, 3, 8) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen, _ = attend(torch.nn.Identity(), *given, None, packing=packing)
    assert {x.dtype for x in calls[0][0][:3]} == {torch.bfloat16}
    assert seen.dtype == torch.bfloat16


def test_nothing_but_half_precision_on_a_gpu_goes_there():
    half = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    assert not attention_cuda.takes_varlen(half, half)


@pytest.mark.parametrize(
    ("dtype", "sizes", "capability", "expected"),
    [
        (torch.bfloat16, (64, 64), (8, 0), True),
        (torch.float16, (64, 64), (9, 0), True),
        (torch.float32, (64, 64), (9, 0), False),
        (torch.bfloat16, (64, 32), (9, 0), False),
        (torch.bfloat16, (60, 60), (9, 0), False),
        (torch.bfloat16, (512, 512), (9, 0), False),
        (torch.bfloat16, (64, 64), (7, 5), False),
    ],
)
def test_heads_that_the_kernel_knows(monkeypatch, dtype, sizes, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(attention_cuda, "kernel", lambda: one_by_one)
    device = torch.device("cuda")
    # What is asked of the tensors; there is no such device here.
    query, value = (
        SimpleNamespace(shape=(1, 2, 3, size), is_cuda=True, dtype=dtype, device=device)
        for size in sizes
    )
    assert attention_cuda.takes_varlen(query, value) is expected


def test_torchs_kernel_comes_before_the_packages(monkeypatch):
    package = SimpleNamespace(flash_attn_varlen_func=lambda *tensors, **named: (tensors, named))
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    own = attention_cuda._of_torch()
    if own is not None:  # torch is new enough
        assert attention_cuda.kernel.__wrapped__() is own
    monkeypatch.setattr(attention_cuda, "_of_torch", lambda: None)
    called = attention_cuda.kernel.__wrapped__()
    tensors, named = called(1, 2, scale=0.5, window_size=(3, 0), enable_gqa=True)
    assert tensors == (1, 2)
    assert named == {"softmax_scale": 0.5, "causal": True, "window_size": (3, 0)}


def test_without_a_kernel_rows_stay_padded(monkeypatch):
    monkeypatch.setattr(attention_cuda, "_of_torch", lambda: None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert attention_cuda.kernel.__wrapped__() is None


def test_a_torch_without_window_and_scale_is_too_old(monkeypatch):
    old = SimpleNamespace(varlen_attn=lambda query, key, value, is_causal=False: query)
    monkeypatch.setattr(attention_cuda, "import_module", lambda _: old)
    assert attention_cuda._of_torch() is None


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", range(3))
def test_the_kernel_itself_says_what_the_grid_says(kind, window, monkeypatch):
    lengths = [torch.tensor([40, 7, 33]), torch.tensor([16, 16])]
    packing, tokens = (
        shared_prompt() if kind == 2 else (Packing.of(lengths[kind]), int(lengths[kind].sum()))
    )
    moved = {
        name: None if part is None else part.cuda()
        for name, part in (("cells", packing.cells), ("tokens", packing.tokens))
    }
    packing = Packing(packing.lengths, **moved)
    given = [
        torch.randn(1, count, tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (4, 2, 2)
    ]
    assert attention_cuda.takes_varlen(given[0], given[2])
    results = []
    for _ in range(2):
        seen, _ = attend(torch.nn.Identity(), *given, None, packing=packing, sliding_window=window)
        results.append((seen, *torch.autograd.grad(seen.float().square().sum(), given)))
        monkeypatch.setattr(attention, "takes_varlen", lambda *_: False)
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=0.05, atol=0.05)
