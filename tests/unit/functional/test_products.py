"""Products by oneDNN: the numbers and gradients of torch's own, and where each is asked."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ppo_lightning.functional import linear, products, rounded_up, row_multiple
from ppo_lightning.functional.products import add_product, product

ROWS, INPUTS, OUTPUTS = 129, 130, 131  # more than 2**21 products

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


@pytest.fixture
def asked(monkeypatch):
    """As on a processor where oneDNN is quicker; how often it is asked."""
    calls: list[tuple[int, ...]] = []
    original = products._onednn

    def counted(x, *others):
        calls.append(tuple(x.shape))
        return original(x, *others)

    monkeypatch.setattr(products, "onednn_is_quicker", lambda: True)
    monkeypatch.setattr(products, "works_in_halves", lambda: False)
    monkeypatch.setattr(products, "_onednn", counted)
    return calls


def drawn(*shapes, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]


def layer(*, bias=True, transposed=False, **settings):
    x, weight, offset, grad = drawn(
        (3, ROWS // 3, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,), (3, ROWS // 3, OUTPUTS), **settings
    )
    weight = weight.t().contiguous() if transposed else weight
    return [x, weight, offset if bias else None], grad


def tried(function, parts, grad, *, transposed=False, trained=(True, True, True)):
    """The result, and gradients as they reach the tensors given."""
    given = [None if x is None else x.clone().requires_grad_(wanted)
             for x, wanted in zip(parts, trained, strict=True)]  # fmt: skip
    x, weight, bias = given
    found = function(x, weight.t() if transposed else weight, bias)
    wanted = [x for x in given if x is not None and x.requires_grad]
    return [found.detach(), *torch.autograd.grad(found, wanted, grad)]


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_numbers_and_gradients_are_those_of_torch(asked, bias, transposed):
    parts, grad = layer(bias=bias, transposed=transposed)
    found = tried(linear, parts, grad, transposed=transposed)
    assert len(asked) == 3
    exact, exact_grad = layer(bias=bias, transposed=transposed, dtype=torch.float32)
    exact = [None if x is None else x.double() for x in exact]
    expected = tried(nn.functional.linear, exact, exact_grad.double(), transposed=transposed)
    assert len(found) == len(expected) == 3 + bias
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        assert relative(ours.double(), theirs) <= 5e-7
    assert found[2].is_contiguous()  # lies as the weight does: it becomes its ``grad`` uncopied


@needs_onednn
@pytest.mark.parametrize(
    "trained", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_nothing_is_computed_for_what_is_frozen(asked, trained):
    parts, grad = layer()
    found = tried(linear, parts, grad, trained=trained)
    assert len(asked) == 1 + any(trained[:2])
    assert_close(
        found, tried(nn.functional.linear, parts, grad, trained=trained), rtol=1e-4, atol=1e-4
    )


@needs_onednn
def test_the_same_product_twice_is_the_same_bits(asked):
    parts, grad = layer()
    once, again = (tried(linear, parts, grad) for _ in range(2))
    assert all(map(torch.equal, once, again))
    assert len(asked) == 6


@needs_onednn
def test_without_gradients_it_is_the_same_number(asked):
    (x, weight, bias), _ = layer()
    with torch.no_grad():
        found = linear(x, weight, bias)
    assert asked == [tuple(x.shape)]
    assert torch.equal(found, linear(x.requires_grad_(), weight, bias))


def refused(name):
    (x, weight, bias), _ = layer()
    match name:
        case "few numbers":
            return x[:1, :1], weight, bias
        case "float64":
            return x.double(), weight.double(), bias.double()
        case "bfloat16":
            return x.bfloat16(), weight.bfloat16(), bias.bfloat16()
        case "no rows":
            return x[:0], weight, bias
        case "one number for a bias":  # oneDNN would read on behind it
            return x, weight, bias[:1].expand(OUTPUTS)
    return x.as_subclass(Marked), weight, bias


class Marked(torch.Tensor):
    """A tensor with products of its own, maybe."""


@pytest.mark.parametrize(
    "name", ["few numbers", "float64", "bfloat16", "no rows", "one number for a bias", "subclass"]
)
def test_anything_else_is_left_to_torch(asked, name):
    parts = refused(name)
    found = linear(*parts)
    assert asked == []
    assert torch.equal(found, nn.functional.linear(*parts))
    assert type(found) is type(parts[0])


def test_autocast_rules_the_dtype(asked):
    (x, weight, bias), _ = layer()
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    assert asked == []


def test_wrong_sizes_are_refused_as_torch_refuses_them(asked):
    (x, weight, _), _ = layer()
    for parts in ((x, weight[:, 1:]), (weight[0], weight.t())):
        with pytest.raises(RuntimeError, match=r"shape|size"):
            linear(*parts)


@pytest.mark.parametrize("sizes", [[(2048,), (1024, 2048)], [(1024, 2048), (2048,)]])
def test_vectors_are_left_to_torch(asked, sizes):
    x, weight = drawn(*sizes)
    assert torch.equal(linear(x, weight), nn.functional.linear(x, weight))
    assert asked == []


@needs_onednn
def test_the_result_may_be_changed_in_place(asked):
    """As families do that clip queries and keys."""
    parts, grad = layer()

    def clamped(function):
        return tried(lambda *given: function(*given).clamp_(-1, 1), parts, grad)

    found, expected = clamped(linear), clamped(nn.functional.linear)
    assert all(relative(*pair) <= 1e-6 for pair in zip(found, expected, strict=True))
    assert len(asked) == 3


@needs_onednn
@pytest.mark.parametrize(
    ("trained", "kept"), [("x", ["weight"]), ("weight", ["x"]), ("bias", [])], ids=str
)
def test_no_more_is_kept_than_gradients_need(asked, trained, kept):
    names = ("x", "weight", "bias")
    parts = dict(zip(names, layer()[0], strict=True))
    parts[trained].requires_grad_()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.data_ptr()), id):
        linear(*parts.values())
    assert seen == [parts[name].data_ptr() for name in kept]
    assert len(asked) == 1


@needs_onednn
@pytest.mark.parametrize("transposed", [True, False])
def test_inputs_and_gradients_may_lie_anyhow(asked, transposed):
    """Part of a tensor, and a gradient that is one number for all."""
    (x, weight, bias), _ = layer(transposed=transposed)
    wide = torch.stack([x, x], dim=1)[:, 0]
    assert not wide.is_contiguous()
    one = torch.ones(()).expand(*x.shape[:-1], OUTPUTS)
    found = tried(linear, (wide, weight, bias), one, transposed=transposed)
    assert len(asked) == 3
    expected = tried(nn.functional.linear, (wide, weight, bias), one, transposed=transposed)
    assert all(relative(*pair) <= 1e-6 for pair in zip(found, expected, strict=True))


@needs_onednn
def test_it_is_differentiated_once(asked):
    (x, weight, _), grad = layer(bias=False)
    x.requires_grad_()
    (first,) = torch.autograd.grad(linear(x, weight), x, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_onednn_can_be_switched_off(asked, monkeypatch):
    (x, weight, bias), _ = layer()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    linear(x, weight, bias)
    assert asked == []


@needs_onednn
@pytest.mark.parametrize("block", [None, 1])
def test_a_product_is_added_in_place_little_by_little(asked, monkeypatch, block):
    left, right, total = drawn((ROWS, INPUTS), (INPUTS, OUTPUTS), (ROWS, OUTPUTS))
    expected = total.double() + left.double() @ right.double()
    if block:
        monkeypatch.setattr(products, "BLOCK_BYTES", block)
    add_product(total, left.t().contiguous().t(), right)
    assert len(asked) == (1 if block is None else -(-ROWS // 64))
    assert relative(total.double(), expected) <= 5e-7
    assert relative(product(left, right).double(), left.double() @ right.double()) <= 5e-7


def test_a_product_in_other_dtypes_is_added_too(asked):
    left, right, total = drawn((6, 5), (5, 4), (6, 4))
    expected = total + (left.bfloat16() @ right.bfloat16())
    add_product(total, left.bfloat16(), right.bfloat16())
    assert torch.equal(total, expected)
    assert asked == []


@pytest.mark.parametrize(
    ("says", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
    ],
)
def test_only_wide_processors_of_amd_ask_it(monkeypatch, says, capability, expected):
    monkeypatch.setattr(products, "_processor", lambda: {"vendor_id": says})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    assert products.onednn_is_quicker.__wrapped__() == (expected and has_both)


@pytest.mark.parametrize(("quicker", "expected"), [(True, 16), (False, 1)])
def test_rows_come_in_round_numbers_where_products_are_compiled(monkeypatch, quicker, expected):
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: quicker)
    (weight,) = drawn((4, 3))
    assert row_multiple(weight) == expected
    assert row_multiple(weight.double()) == 1
    assert row_multiple(weight.bfloat16()) == 16
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert row_multiple(weight) == 1


@pytest.mark.parametrize(
    ("count", "multiple", "expected"),
    [(0, 16, 0), (1, 16, 16), (16, 16, 16), (1023, 16, 1024), (1025, 16, 1056), (1025, 1, 1025),
     (4097, 16, 4224), (7, 5, 10), (1025, 5, 1040)],
)  # fmt: skip
def test_many_rows_are_rounded_more_coarsely(count, multiple, expected):
    assert rounded_up(count, multiple) == expected


def test_rounding_adds_a_32nd_at_most_and_leaves_few_numbers():
    rounded = {count: rounded_up(count, 16) for count in range(512, 8192)}
    assert all(0 <= up - count <= count / 32 for count, up in rounded.items())
    assert len(set(rounded.values())) <= 4 * 33


@pytest.mark.parametrize(
    ("family", "expected"), [("25", True), ("26", False), ("", False), ("unknown", False)]
)
def test_a_processor_is_known_by_its_family(monkeypatch, family, expected):
    monkeypatch.setattr(products, "_processor", lambda: {"cpu family": family})
    assert products.works_in_halves.__wrapped__() == expected


def test_the_first_processor_is_read(monkeypatch, tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nvendor_id\t: A\ncpu family\t: 7\n\nvendor_id\t: B\n")
    monkeypatch.setattr(products, "Path", lambda _: path)
    assert products._processor() == {"vendor_id": "A", "cpu family": "7"}
    path.unlink()
    assert products._processor()["cpu family"] == ""


@needs_onednn
@pytest.mark.parametrize(
    ("inputs", "outputs", "calls"), [(512, 520, 2), (520, 512, 3), (40, 40, 0)]
)
def test_in_halves_most_gradients_of_weights_are_torchs(asked, monkeypatch, inputs, outputs, calls):
    monkeypatch.setattr(products, "works_in_halves", lambda: True)
    x, weight, grad = drawn((129, inputs), (outputs, inputs), (129, outputs))
    found = tried(linear, [x, weight, None], grad, trained=(True, True, False))
    assert len(asked) == calls  # forward and for the layer before; 40 times 40 are too few numbers
    expected = tried(nn.functional.linear, [x, weight, None], grad, trained=(True, True, False))
    assert_close(found, expected, rtol=1e-4, atol=1e-3)
