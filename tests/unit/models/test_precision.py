"""Eight-bit weights: how far off they may be, and what they leave alone."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification, GPT2Config
from transformers import GPT2ForSequenceClassification as GPT2Classifier

from ppo_lightning.errors import ModelError
from ppo_lightning.models import SequenceScorer
from ppo_lightning.models.precision import Int8Linear, quantise_linears, quantised_rows
from tests.helpers.tiny_models import build_reward_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TEXTS = ["a good dog.", "why?", "the cat sat on the bad red house and the dog ran", "x"]


def weights(seed=0, rows=17, columns=33):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-6, 6, rows)[:, None]
    return torch.randn(rows, columns, generator=generator) * scales


@pytest.mark.parametrize("device", DEVICES)
def test_each_weight_is_off_by_half_a_step_of_its_row_at_most(device):
    weight = weights().to(device)
    steps, scale = quantised_rows(weight)
    assert steps.dtype == torch.int8
    assert int(steps.abs().max()) == 127
    error = (steps.double() * scale[:, None].double() - weight.double()).abs()
    bound = weight.double().abs().amax(1) / 254
    assert (error <= bound[:, None] * (1 + 1e-5)).all()
    # And not by much less: other rows' sizes do not matter, and no bit is wasted.
    assert (error.amax(1) > 0.5 * bound).all()


def test_the_largest_weight_of_a_row_is_kept():
    steps, scale = quantised_rows(torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]))
    assert steps.tolist() == [[64, -127, 32], [0, 0, 0]]
    assert_close(scale[0], torch.tensor(1 / 127))
    assert scale[1].isfinite()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_an_output_is_off_by_no_more_than_its_bound(device, dtype, bias):
    torch.manual_seed(1)
    layer = nn.Linear(33, 17, bias=bias).to(device, dtype)
    x = torch.randn(2, 5, 33, device=device).to(dtype)
    small = Int8Linear(layer.weight, layer.bias)
    found, exact = small(x).double(), layer.double()(x.double())
    step = layer.weight.abs().amax(1) / 254
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert small(x).dtype == dtype
    assert ((found - exact).abs() <= step * x.double().abs().sum(-1, keepdim=True) + rounding).all()
    if dtype != torch.bfloat16:
        assert (found - exact).abs().max() > 1e-4  # it is not the layer as it was


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (lambda: BertForSequenceClassification(small(BertConfig)), "classifier"),
        (
            lambda: GPT2Classifier(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)),
            "score",
        ),
    ],
)
def test_the_trunks_layers_are_replaced_and_the_head_is_not(model, head):
    torch.manual_seed(0)
    model = model().eval().requires_grad_(False)
    ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.long)
    model.config.pad_token_id = 0
    before = model(input_ids=ids, attention_mask=mask).logits
    assert quantise_linears(model, "int8") >= 4
    kinds = {type(m).__name__ for m in model.base_model.modules()}
    assert "Int8Linear" in kinds
    assert not kinds & {"Linear", "Conv1D"}
    assert type(getattr(model, head)) is nn.Linear
    after = model(input_ids=ids, attention_mask=mask).logits
    assert 0 < (after - before).abs().max() < 0.05 * before.abs().max()


def small(kind):
    return kind(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)


def test_a_model_without_linear_layers():
    class Model(nn.Module):
        base_model = nn.Embedding(3, 4)

    with pytest.raises(ModelError, match="finds no linear layer in Model"):
        quantise_linears(Model(), "int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scores_and_memory(tmp_path, dtype):
    folder = build_reward_model(tmp_path, initializer_range=0.1)
    exact = SequenceScorer.load(str(folder)).score(TEXTS)
    whole = SequenceScorer.load(str(folder), dtype=dtype)
    found = SequenceScorer.load(str(folder), dtype=dtype, quantization="int8")
    scores = found.score(TEXTS)
    assert scores.dtype == torch.float32
    assert_close(scores, exact, atol=0.05 * float(exact.std()), rtol=0.05)
    assert found.fingerprint() == whole.fingerprint()

    def trunk_bytes(model):
        tensors = [*model.parameters(), *model.buffers()]
        return sum(t.nbytes for t in tensors if t.dim() == 2 and t.shape[0] != 56)

    assert trunk_bytes(found.model.model.layers) < trunk_bytes(whole.model.model.layers) / (
        3.9 if dtype == "float32" else 1.9
    )


def test_padding_and_neighbours_change_nothing(tmp_path):
    scorer = SequenceScorer.load(str(build_reward_model(tmp_path)), quantization="int8")
    alone = torch.cat([scorer.score([text]) for text in TEXTS])
    assert_close(scorer.score(TEXTS), alone, atol=1e-5, rtol=1e-5)


def test_float16_holds_the_sums_that_it_holds_with_whole_weights():
    random = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(8, 2048, generator=random)
    x = torch.randn(4, 2048, generator=random)
    x[:, ::256] = 800.0
    found = Int8Linear(weight, None)(x.half())
    assert_close(found.float(), x @ weight.T, rtol=0.02, atol=1.0)
