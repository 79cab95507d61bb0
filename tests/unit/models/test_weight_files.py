"""Digests of files: from single values, as if the tensors had been read whole."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from ppo_lightning.models import weight_files
from ppo_lightning.models.card import weights_fingerprint


def whole(file):
    """The digest of tensors that are loaded and sampled in memory."""
    lines = []
    for name, tensor in load_file(file).items():
        flat = tensor.flatten()
        places = torch.linspace(0, max(len(flat) - 1, 0), min(len(flat), 64), dtype=torch.float64)
        values = torch.stack([flat[int(p)] for p in places]).float() if len(flat) else flat.float()
        lines.append(f"{name}{tuple(tensor.shape)}".encode() + values.numpy().tobytes())
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def model_of(folder, **tensors):
    (folder / "config.json").write_text("{}", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


SHAPES = [(), (1,), (63,), (64,), (65,), (1000,), (0,), (3, 0), (7, 9), (300, 70), (5, 6, 11)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_single_values_make_the_digest_of_whole_tensors(tmp_path, dtype):
    torch.manual_seed(0)
    tensors = {f"t{n}": (100 * torch.randn(shape)).to(dtype) for n, shape in enumerate(SHAPES)}
    file = model_of(tmp_path, **tensors)
    assert weights_fingerprint(str(tmp_path)) == whole(file)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool],
)
def test_less_usual_types_too(tmp_path, dtype):
    file = model_of(tmp_path, a=(torch.arange(200) % 7).to(dtype), b=torch.ones(3, 4))
    assert weights_fingerprint(str(tmp_path)) == whole(file)


def test_a_type_without_a_place_in_the_table_is_read_whole(tmp_path, monkeypatch):
    file = model_of(tmp_path, a=torch.randn(40, 30).bfloat16(), b=torch.randn(5))
    monkeypatch.delitem(weight_files._DTYPES, "BF16")
    assert weights_fingerprint(str(tmp_path)) == whole(file)


def test_no_more_is_read_than_is_looked_at(tmp_path, monkeypatch):
    model_of(tmp_path, a=torch.randn(1000, 200), b=torch.randn(300, 300), c=torch.randn(5))
    own, read = weight_files._read, []

    class Counting:
        def __init__(self, content):
            self.content, self.seek = content, content.seek

        def read(self, size):
            read.append(size)
            return self.content.read(size)

    monkeypatch.setattr(weight_files, "_read", lambda content, *rest: own(Counting(content), *rest))
    assert weights_fingerprint(str(tmp_path))
    assert read == [4] * (64 + 64 + 5)
