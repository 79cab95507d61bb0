"""A dumped buffer gives its update again."""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.callbacks import DumpBuffers
from ppo_lightning.errors import DataError
from ppo_lightning.rollout import ReplayDataModule, load_buffer
from tests.helpers.runs import data_module, fit, parameters, ppo_module


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_an_update_is_replayed_bit_for_bit(tiny_model_dir, tmp_path):
    keep = ModelCheckpoint(filename="{epoch}", save_top_k=-1)
    module = ppo_module(tiny_model_dir)
    original = fit(tmp_path, module, data_module(), max_epochs=3, callbacks=[keep, DumpBuffers()])
    assert len(list((tmp_path / "buffers").iterdir())) == 3
    again = ppo_module(tiny_model_dir)
    replayed = fit(
        tmp_path / "again",
        again,
        ReplayDataModule(str(tmp_path / "buffers/iteration_0002.rank0.pt")),
        ckpt=tmp_path / "checkpoints/epoch=1.ckpt",
        max_epochs=3,
    )
    assert replayed.stats[0].policy_loss == original.stats[2].policy_loss
    assert replayed.collected == []  # nothing was sampled
    for name, value in parameters(module).items():
        assert value.equal(dict(again.named_parameters())[name]), name


def test_what_is_no_buffer_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_buffer(tmp_path / "missing.pt")
    (tmp_path / "text.pt").write_text("not a buffer")
    with pytest.raises(DataError, match=r"text\.pt: this is no buffer"):
        load_buffer(tmp_path / "text.pt")
