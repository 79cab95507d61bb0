"""The model that two processes leave behind, and what they say of its start."""

import warnings

from ppo_lightning.callbacks import ExportModel
from ppo_lightning.configs import GuardConfig, ReferenceConfig
from ppo_lightning.models.card import weights_fingerprint
from ppo_lightning.modules import export_model
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import data_module, fit, ppo_module
from tests.helpers.tiny_models import build_llama


def train(model_dir, folder, ranks, reference=None, full_disk=False):
    """Fit; returns what was said, what is there when this rank goes on, and the failure."""
    if full_disk:
        export_model.write_card = _full_disk
    failure = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(
                folder,
                ppo_module(
                    model_dir,
                    guards=GuardConfig(advice="warn"),
                    reference=reference or ReferenceConfig(),
                ),
                data_module(buffer={"num_prompts": 7, "num_minibatches": 3}),
                callbacks=[ExportModel(monitor="rollout/score_mean", mode="max")],
                strategy="ddp" if ranks > 1 else "auto",
                devices=ranks,
                max_epochs=2,
                enable_checkpointing=False,
            )
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    there = (folder / "model" / "ppo_lightning.json").is_file()
    said = [line for w in caught for line in str(w.message).splitlines() if "nats per" in line]
    return said, there, failure


def _full_disk(folder, card):
    raise OSError(28, "No space left on device", str(folder))


def test_the_first_rank_writes_and_the_others_wait(tiny_gpt2_dir, tmp_path):
    for _, there, failure in run_on_ranks(train, 2, tiny_gpt2_dir, tmp_path / "two", 2):
        assert there
        assert failure is None
    assert not list((tmp_path / "two").glob(".model*"))
    assert weights_fingerprint(str(tmp_path / "two"))


def test_all_ranks_end_where_the_first_cannot_write(tiny_gpt2_dir, tmp_path):
    first, second = run_on_ranks(train, 2, tiny_gpt2_dir, tmp_path, 2, None, True)
    assert "No space left" in first[2]
    assert "could not be written; the first rank says why" in second[2]
    assert not list(tmp_path.glob("*model*"))


def test_the_kl_at_the_start_is_of_all_ranks(tiny_llama_dir, tmp_path):
    other = ReferenceConfig(path=str(build_llama(tmp_path / "other", seed=5)))
    (alone,), _, _ = train(tiny_llama_dir, tmp_path / "one", 1, other)
    first, second = run_on_ranks(train, 2, tiny_llama_dir, tmp_path / "two", 2, other)
    assert "(7 responses)" in alone
    assert first[0] == [alone]
    assert second[0] == []  # it is said once


def test_an_error_is_every_ranks(tiny_llama_dir, tmp_path):
    other = ReferenceConfig(path=str(build_llama(tmp_path / "other", seed=5)))
    for _, _, failure in run_on_ranks(strict, 2, tiny_llama_dir, tmp_path / "run", other):
        assert "reference.path" in failure


def strict(model_dir, folder, reference):
    """Fit with ``advice: error``; the settings themselves give no cause for one."""
    module = ppo_module(
        model_dir, guards=GuardConfig(advice="error"), ppo={"target_kl": 0.02}, reference=reference
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(
                folder, module, data_module(), strategy="ddp", devices=2, enable_checkpointing=False
            )
    except Exception as error:
        return [], False, str(error)
    return [], False, None
