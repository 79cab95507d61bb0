"""The model in a run's folder, so that one step's output is the next one's input.

``runs/sft`` means ``runs/sft/model`` if that is there, as ``ppo-lightning export`` and runs without
a logger write it; else the ``model`` of the highest ``version_…`` that has one, in
``runs/sft/lightning_logs``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from ppo_lightning.errors import nearest

MODEL_FOLDER = "model"
"""Where a run keeps the model that it leaves behind, in its folder."""

_LOGS = "lightning_logs"
_CONFIGS = ("config.json", "adapter_config.json")  # of transformers and of PEFT
_SIGNS = (_LOGS, "checkpoints", "metrics.jsonl", "config.yaml")  # that it is a run's folder

log = logging.getLogger(__name__)
_told: set[Path] = set()


def is_model(folder: Path) -> bool:
    """Whether transformers or PEFT has written it."""
    return any((folder / name).is_file() for name in _CONFIGS)


def model_of_run(folder: Path) -> Path | None:
    """Find the model that a run has left; a line in the log names it, once.

    Args:
        folder: Of the run; the Trainer's ``default_root_dir``, or that of one version.

    Returns:
        None if there is none.
    """
    versions = run_versions(folder)
    candidates = [place / MODEL_FOLDER for place in (folder, *versions)]
    found = next((place for place in candidates if is_model(place)), None)
    if found is not None and found not in _told:
        _told.add(found)
        log.info(
            "`%s` is a run's folder: its model is `%s`.%s", folder, found, _newer(versions, found)
        )
        if found == candidates[0]:
            _warn_of_newer(found, candidates)
    return found


def _warn_of_newer(found: Path, candidates: Iterable[Path]) -> None:
    """Say that a run has written its model elsewhere since: the one above it is old."""
    written = _written(found)
    for place in candidates:
        if is_model(place) and _written(place) > written:
            log.warning("`%s` is newer than `%s`: give its path to take it.", place, found)
            return


def _written(model: Path) -> float:
    return max((model / name).stat().st_mtime for name in _CONFIGS if (model / name).is_file())


def why_no_model(folder: Path, path: str) -> str:
    """Say what a folder holds instead of a model, and what to do.

    Args:
        folder: Without a model, and without a run's.
        path: As the user gave it.
    """
    files = _checkpoints(folder)
    if files:
        return (
            f"`{path}` is the folder of a run that has left no model: it was stopped before its "
            "end, or the callback `ppo_lightning.callbacks.ExportModel` was not in "
            f"`trainer.callbacks`. Its newest checkpoint is `{files[-1]}` ({len(files)} in all): "
            f"`ppo-lightning export {files[-1]} {folder / MODEL_FOLDER}` writes that one's "
            "model, or finish the run with `--ckpt_path last`."
        )
    if any((folder / name).exists() for name in _SIGNS):
        return (
            f"`{path}` is the folder of a run that has left neither a model nor a checkpoint: it "
            "was stopped before its first one. Run it again."
        )
    return (
        f"`{path}` holds no `config.json`, so it is not a model's folder. Give the folder that "
        "`save_pretrained` has written, a run's folder with a `model` in it, or the `.gguf` file "
        "itself."
    )


def why_no_run(path: str) -> str | None:
    """Say of a path that is not there that a run is meant by it: others lie beside it.

    ``runs/sft`` has the form of a hub name too, and the hub would be asked, again and again.

    Args:
        path: As the user gave it.
    """
    place = Path(path)
    if place.exists() or place.parent == Path() or not place.parent.is_dir():
        return None
    runs = sorted(folder.name for folder in place.parent.iterdir() if _is_run(folder))
    if not runs:
        return None
    near = nearest(place.name, runs)
    hint = f"Did you mean `{place.parent / near}`? " if near else ""
    listed = ", ".join(runs)
    return f"`{path}` does not exist; `{place.parent}` holds the runs {listed}. {hint}Run it first."


def _is_run(folder: Path) -> bool:
    return is_model(folder / MODEL_FOLDER) or any((folder / sign).exists() for sign in _SIGNS)


def run_versions(folder: Path) -> list[Path]:
    """Folders of single runs, the latest first: also where ``lightning_logs`` itself is given.

    Args:
        folder: The Trainer's ``default_root_dir``; that of one version has none in it.
    """
    found = [place for top in (folder / _LOGS, folder) for place in top.glob("version_*")]
    numbered = [(int(match[1]), place) for place in found if (match := _number(place))]
    return [place for _, place in sorted(numbered, reverse=True)]


def _number(place: Path) -> re.Match[str] | None:
    return re.fullmatch(r"version_(\d+)", place.name)


def _newer(versions: Iterable[Path], found: Path) -> str:
    """Say that later runs have left none, or not yet."""
    places = list(versions)
    later = places[: places.index(found.parent)] if found.parent in places else []
    names = ", ".join(place.name for place in later[:3])
    names += f" and {len(later) - 3} others" if len(later) > 3 else ""
    return f" Later runs there have none: {names}." if names else ""


def _checkpoints(folder: Path) -> list[Path]:
    """Of a run's folder, the newest last. Not everything below it, which may be a whole disk."""
    places = [folder, *run_versions(folder)]
    found = [
        f for place in places for f in (*place.glob("*.ckpt"), *place.glob("checkpoints/*.ckpt"))
    ]
    files = {file for file in found if file.is_file()}
    return sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name))
