"""Bars are off while weights are read or written, and as they were afterwards."""

import pytest
from transformers.utils import logging

from ppo_lightning.models.bars import without_bars


@pytest.mark.parametrize("shown", [True, False])
def test_bars_are_given_back(monkeypatch, shown):
    monkeypatch.setattr(logging, "_tqdm_active", shown)
    with without_bars():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() is shown
    with pytest.raises(RuntimeError), without_bars():
        raise RuntimeError
    assert logging.is_progress_bar_enabled() is shown
