"""Models without weights are what would be loaded."""

from ppo_lightning.configs import PolicyConfig
from ppo_lightning.models import load_causal_lm, reading_of
from ppo_lightning.models.skeleton import guess_reading, is_weightless, without_weights


def _shapes(model):
    return {name: (p.shape, p.dtype) for name, p in model.named_parameters()}


def test_a_skeleton_has_the_shapes_and_the_reading_of_the_loaded_model(tiny_model_dir):
    policy = PolicyConfig(path=str(tiny_model_dir))
    loaded = load_causal_lm(policy)
    with without_weights():
        model = load_causal_lm(policy)
    assert not is_weightless()
    assert all(p.is_meta for p in model.parameters())
    assert _shapes(model) == _shapes(loaded)
    assert guess_reading(model, packing=True) == reading_of(loaded) == reading_of(model)
    assert model.config._attn_implementation == loaded.config._attn_implementation
