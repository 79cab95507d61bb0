"""Reward models from any trunk: heads, adapters, frozen layers, and scores of deviation 1."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from ppo_lightning.configs import BackboneConfig, LoraConfig, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    attach_lora,
    base_scorer,
    build_scorer,
    load_causal_lm,
    load_scorer,
    load_tokenizer,
    normalised_head,
    sequence_logits,
)
from ppo_lightning.models.pad_token import distinct_pad, use_distinct_pad
from ppo_lightning.models.score_head import head_parameters, score_layer
from tests.helpers.preferences import FAMILIES, build_backbone, build_bert
from tests.helpers.tiny_models import build_reward_model, byte_pair_tokenizer

CLASSES = {
    "gpt2": GPT2ForSequenceClassification,
    "llama": LlamaForSequenceClassification,
    "bert": BertForSequenceClassification,
}
IDS = torch.tensor([[7, 8, 9, 10, 11], [12, 13, 14, 15, 16]])
MASK = torch.ones_like(IDS)


@pytest.fixture(scope="module", params=FAMILIES)
def backbone(request, tmp_path_factory) -> tuple[str, Path]:
    family = request.param
    return family, build_backbone(family, tmp_path_factory.mktemp("backbone") / family)


def scores(model: nn.Module, ids: torch.Tensor = IDS, mask: torch.Tensor = MASK) -> torch.Tensor:
    with torch.no_grad():
        return sequence_logits(base_scorer(model), ids, mask)[:, 0]


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_new_head_starts_over_the_folders_own_trunk(backbone):
    family, folder = backbone
    model = load_scorer(BackboneConfig(path=str(folder), head_init="zero"))
    assert type(model) is CLASSES[family]
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    assert scores(model).tolist() == [0.0, 0.0]
    weights = load_file(folder / "model.safetensors")
    prefix = {"gpt2": "", "llama": "", "bert": "bert."}[family]
    own = dict(model.state_dict())
    shared = [name for name in weights if prefix + name in own and "score" not in name]
    assert len(shared) > 10
    for name in shared:
        assert_close(own[prefix + name], weights[name], rtol=0, atol=0)
    drawn = score_layer(load_scorer(BackboneConfig(path=str(folder))))  # the default
    wanted = (drawn.in_features + 1) ** -0.5
    assert float(drawn.weight.detach().square().mean().sqrt()) == pytest.approx(wanted, rel=0.5)
    assert drawn.bias is None or not drawn.bias.any()


def test_a_normal_head_has_the_documented_spread(backbone):
    _, folder = backbone
    torch.manual_seed(0)
    model = load_scorer(BackboneConfig(path=str(folder), head_init="normal"))
    weight = score_layer(model).weight
    assert 0.5 < float(weight.detach().std()) * (weight.shape[1] + 1) ** 0.5 < 1.5
    assert scores(model).unique().numel() == 2


def test_t37_a_reward_model_is_taken_over_with_its_head(tmp_path):
    folder = build_reward_model(tmp_path / "reward")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    assert_close(scores(load_scorer(BackboneConfig(path=str(folder)))), scores(theirs))


def test_a_classifier_of_several_labels_lends_its_trunk(tmp_path):
    folder = build_reward_model(tmp_path / "labels", num_labels=3)
    model = load_scorer(BackboneConfig(path=str(folder), head_init="zero"))
    assert scores(model).tolist() == [0.0, 0.0]
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    assert_close(model.model.norm.weight, theirs.model.norm.weight)
    assert_close(model.model.embed_tokens.weight, theirs.model.embed_tokens.weight)


def test_t25_an_adapter_folder_is_merged_into_the_trunk(tmp_path, tiny_llama_dir):
    base = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    adapted = attach_lora(base, LoraConfig(rank=2))
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    adapted.save_pretrained(tmp_path / "adapter")
    model = load_scorer(BackboneConfig(path=str(tmp_path / "adapter"), head_init="normal"))
    merged = adapted.merge_and_unload()
    assert_close(
        model.model.layers[0].mlp.up_proj.weight, merged.model.layers[0].mlp.up_proj.weight
    )
    assert scores(model).isfinite().all()


def test_t10_dropout_is_off_unless_it_is_kept(tmp_path):
    folder = build_bert(tmp_path / "bert")  # 0.1 in its config
    for keep in (False, True):
        model = build_scorer(
            BackboneConfig(path=str(folder), head_init="normal"), keep_dropout=keep
        ).train()
        same = torch.equal(scores(model), scores(model))
        assert same is not keep


def test_adapters_train_beside_the_head_and_leave_it_whole(backbone):
    _, folder = backbone
    lora = LoraConfig(rank=2)
    model = build_scorer(BackboneConfig(path=str(folder), lora=lora, head_init="zero"))
    names = trained(model)
    assert any("lora_A" in name for name in names)
    heads = {name for name in names if "lora" not in name}
    assert len(heads) == len(head_parameters(base_scorer(model)))
    assert not any("lora" in name and ("score" in name or "classifier" in name) for name in names)
    assert scores(model).tolist() == [0.0, 0.0]


def test_adapters_on_the_last_blocks_only(backbone):
    _, folder = backbone
    model = build_scorer(BackboneConfig(path=str(folder), lora=LoraConfig(rank=2, layers=1)))
    blocks = {name for name in trained(model) if "lora" in name}
    assert blocks
    assert all(".1." in name for name in blocks)


def test_a_bfloat16_trunk_under_adapters_has_a_float32_head(tiny_llama_dir):
    config = BackboneConfig(path=str(tiny_llama_dir), dtype="bfloat16", lora=LoraConfig(rank=2))
    model = build_scorer(config)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    nn.init.normal_(score_layer(base_scorer(model)).weight)
    assert scores(model).dtype == torch.float32


def test_layers_below_the_last_are_frozen(backbone):
    family, folder = backbone
    names = trained(build_scorer(BackboneConfig(path=str(folder), trainable_layers=1)))
    assert not any("embed" in name or "wte" in name or "wpe" in name for name in names)
    assert not any(".0." in name for name in names)
    assert any(".1." in name for name in names)
    after = {"gpt2": "transformer.ln_f.weight", "llama": "model.norm.weight"}
    assert after.get(family, "bert.pooler.dense.weight") in names
    head = trained(build_scorer(BackboneConfig(path=str(folder), trainable_layers=0)))
    assert head == {"score.weight"} if family != "bert" else len(head) == 4
    assert family != "bert" or all("pooler" in name or "classifier" in name for name in head)
    with pytest.raises(ValueError, match=r"`backbone.trainable_layers` must be at most 2.*got 3"):
        build_scorer(BackboneConfig(path=str(folder), trainable_layers=3))


def test_t24_scores_do_not_depend_on_the_side_or_the_ids_of_padding(backbone):
    _, folder = backbone
    torch.manual_seed(0)
    model = load_scorer(BackboneConfig(path=str(folder), head_init="normal"))
    row = [7, 8, 9]
    alone = scores(model, torch.tensor([row]), torch.ones(1, 3).long())
    for filler in (0, 5, 20):
        right = torch.tensor([[*row, filler, filler], [7, 8, 9, 10, 11]])
        left = torch.tensor([[filler, filler, *row], [7, 8, 9, 10, 11]])
        real = torch.tensor([[1, 1, 1, 0, 0], [1] * 5])
        other = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
        assert_close(scores(model, right, real)[:1], alone, rtol=0, atol=1e-5)
        assert_close(scores(model, left, other)[:1], alone, rtol=0, atol=1e-5)


def test_normalising_folds_scale_and_mean_into_the_weights(backbone):
    family, folder = backbone
    torch.manual_seed(0)
    model = load_scorer(BackboneConfig(path=str(folder), head_init="normal"))
    before = scores(model)
    with normalised_head(model, mean=0.3, std=2.0) as shifted:
        assert shifted is (family != "llama")
        expected = (before - (0.3 if shifted else 0.0)) / 2
        assert_close(scores(model), expected, rtol=0, atol=1e-5)
    assert torch.equal(scores(model), before)  # put back bitwise


def test_encoder_decoders_are_refused(tmp_path):
    config = T5Config(vocab_size=60, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match="encoder-decoder"):
        load_scorer(BackboneConfig(path=str(tmp_path / "t5")))


def test_trainable_layers_and_adapters_exclude_each_other():
    with pytest.raises(ValueError, match=r"`trainable_layers` and `lora` exclude each other"):
        BackboneConfig(path="x", lora=LoraConfig(), trainable_layers=1)


def test_t15_the_pad_token_of_the_export_is_none_that_texts_end_with(tiny_llama_dir):
    tokenizer = load_tokenizer(str(tiny_llama_dir))
    assert distinct_pad(tokenizer) == tokenizer.convert_tokens_to_ids("<pad>")
    tokenizer.pad_token = tokenizer.eos_token
    assert distinct_pad(tokenizer) == tokenizer.unk_token_id == tokenizer.pad_token_id
    single = byte_pair_tokenizer()
    single.pad_token = single.unk_token = single.eos_token
    assert distinct_pad(single) is None
    model = load_scorer(BackboneConfig(path=str(tiny_llama_dir)))
    before = model.config.pad_token_id
    with use_distinct_pad(model, single):
        assert model.config.pad_token_id is None
    assert model.config.pad_token_id == before


@pytest.mark.parametrize("how", [{"lora": LoraConfig(rank=2)}, {"trainable_layers": 0}])
def test_a_pooler_that_the_folder_lacks_is_trained(tmp_path, how):
    """It starts at random: frozen, no checkpoint would hold it and no second run would have it."""
    folder = build_bert(tmp_path / "bert")
    masked = BertForMaskedLM.from_pretrained(folder)
    masked.save_pretrained(folder)
    model = build_scorer(BackboneConfig(path=str(folder), **how))
    poolers = {name: p.requires_grad for name, p in model.named_parameters() if "pooler" in name}
    assert poolers
    assert all(poolers.values())
    assert not any("lora" in name for name in poolers)


def test_an_encoders_adapters_may_lie_on_a_coarse_trunk(tmp_path):
    """Head and pooler are float32 there; the scores must be too, and have their gradients."""
    folder = build_bert(tmp_path / "bert")
    config = BackboneConfig(path=str(folder), dtype="bfloat16", lora=LoraConfig(rank=2))
    model = build_scorer(config)
    nn.init.normal_(score_layer(base_scorer(model)).weight)
    found = sequence_logits(base_scorer(model), IDS, MASK)[:, 0]
    found.sum().backward()
    assert found.dtype == torch.float32
    assert (found != found.bfloat16().float()).any()


def test_t44_an_encoders_scores_are_not_rounded_under_autocast(tmp_path):
    """A pair whose scores differ by less than three digits show would be a tie."""
    folder = build_bert(tmp_path / "bert")
    torch.manual_seed(0)
    model = load_scorer(BackboneConfig(path=str(folder), head_init="normal"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scores(model)
    assert (found != found.bfloat16().float()).any()
    assert_close(found, scores(model), rtol=0, atol=0.05)
