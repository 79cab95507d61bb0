"""Lightning's loggers, chosen in the config: each gets every number, over one axis, the iteration.

T58: also after a resume.
"""

from __future__ import annotations

import csv
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_lightning.metrics import read_metrics
from tests.helpers.cli import changed, run_cli, tiny_config, write_config

Series = dict[str, list[tuple[int, float]]]  # (step, value) in the order of logging, by name

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def tensorboard(folder: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb/run/version_0"), size_guidance={"scalars": 0})
    events.Reload()
    found = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    # Files of one second are read in the order of a counter as text: the tenth before the ninth.
    ordered = {tag: sorted(series, key=lambda e: e.wall_time) for tag, series in found.items()}
    return {tag: [(e.step, e.value) for e in series] for tag, series in ordered.items()}


def comma_separated(folder: Path) -> Series:
    series = defaultdict(list)
    for file in sorted(folder.glob("csv/run/version_*/metrics.csv")):
        with file.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                step = int(row.pop("step"))
                for name, value in row.items():
                    if value:
                        series[name].append((step, float(value)))
    return series


def mlflow(folder: Path) -> Series:
    """Its files hold a line a value: time, value, step."""
    series = defaultdict(list)
    for metrics in folder.glob("mlflow/*/*/metrics"):
        for file in metrics.rglob("*"):
            if file.is_file():
                rows = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
                name = file.relative_to(metrics).as_posix()
                series[name] += [(int(step), float(value)) for _, value, step in rows]
    return series


WANDB_FILES = "wandb/wandb/offline-run-*/*.wandb"


def wandb(folder: Path) -> Series:
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    series = defaultdict(list)
    for file in sorted(folder.glob(WANDB_FILES)):
        for data in wandb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = ((i.key or ".".join(i.nested_key), i.value_json) for i in record.history.item)
            row = {key: json.loads(value) for key, value in items}
            step = row.pop("trainer/global_step", None)  # the axis that Lightning names
            for name, value in row.items():
                if step is not None and name[0] != "_":
                    series[name].append((step, value))
    return series


def wandb_is_whole(data: bytes) -> bool:
    """Whether the record of the end is there."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record.FromString(found) for found in wandb_records(data)]
    return bool(records) and records[-1].WhichOneof("record_type") == "exit"


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of an offline run's file: blocks of 32 KiB, as in LevelDB's logs."""
    place, parts, size = 7, b"", 32768
    while place + 7 <= len(data):
        if size - place % size < 7:  # no room for a head: the rest of the block is padding
            place += size - place % size
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


LIGHTNINGS = "lightning.pytorch.loggers."
LOGGERS = {
    "tensorboard": ("TensorBoardLogger", {"name": "run", "version": 0}, tensorboard),
    "csv": ("CSVLogger", {"name": "run"}, comma_separated),
    "mlflow": ("MLFlowLogger", {"experiment_name": "run", "run_id": None}, mlflow),
    "wandb": (
        "WandbLogger",
        {"project": "run", "offline": True, "id": "one", "resume": "allow"},
        wandb,
    ),
}
NEEDS = {"mlflow": "mlflow", "wandb": "wandb"}
SAVE_DIR = {"tensorboard": "tb", "csv": "csv", "wandb": "wandb"}


def config_of(kind: str, model_dir: Path, folder: Path) -> dict:
    name, settings, _ = LOGGERS[kind]
    where = (
        {"tracking_uri": f"file:{folder / 'mlflow'}"}
        if kind == "mlflow"
        else {"save_dir": str(folder / SAVE_DIR[kind])}
    )
    logger = {"class_path": LIGHTNINGS + name, "init_args": settings | where}
    return changed(tiny_config(model_dir, folder / "run"), "trainer.logger", logger)


def finish(kind: str, folder: Path) -> None:
    """W&B writes the rest of its file when the run is finished, which Lightning leaves to it.

    A process of its own does so, which on a busy machine comes after `finish` has returned.
    """
    if kind == "wandb":
        import wandb

        wandb.finish()
        files = folder.glob(WANDB_FILES)
        waits = 600
        while waits and not all(wandb_is_whole(file.read_bytes()) for file in files):
            time.sleep(0.1)
            waits, files = waits - 1, folder.glob(WANDB_FILES)


def fit(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, config: dict, *arguments) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # 3.17 asks for a database otherwise
    monkeypatch.setenv("WANDB_SILENT", "true")
    path = write_config(folder / "config.yaml", config)
    try:
        assert run_cli(monkeypatch, "fit", "--config", path, *arguments) == 0
    finally:
        finish(kind, folder)


def measured(folder: Path) -> dict[int, dict[str, float]]:
    """What the run's own files say, by iteration."""
    files = folder.rglob("metrics*.jsonl")
    return {s.iteration: s.to_log() for file in files for s in read_metrics(file)}


@pytest.mark.filterwarnings("ignore:.*(filesystem tracking|maintenance mode):FutureWarning")
@pytest.mark.parametrize("kind", LOGGERS)
def test_every_number_over_one_axis_also_after_a_resume(
    monkeypatch, tmp_path, tiny_llama_dir, kind
):
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind], reason=f"the extra `{NEEDS[kind]}` is not installed")
    config = config_of(kind, tiny_llama_dir, tmp_path)
    fit(monkeypatch, tmp_path, kind, config)
    [checkpoint] = tmp_path.rglob("last.ckpt")
    if kind == "mlflow":
        [run] = (path.parent for path in tmp_path.glob("mlflow/*/*/meta.yaml"))
        config = changed(config, "trainer.logger.init_args.run_id", run.name)
    longer = changed(config, "trainer.max_epochs", 3)
    fit(monkeypatch, tmp_path, kind, longer, "--ckpt_path", checkpoint)

    series, numbers = LOGGERS[kind][2](tmp_path), measured(tmp_path)
    assert sorted(numbers) == [0, 1, 2]
    for values in series.values():
        steps = [step for step, _ in values]
        assert steps == sorted(steps)
        assert set(steps) <= {0, 1, 2}
    for iteration, row in numbers.items():
        for name, value in row.items():
            found = [logged for step, logged in series[name] if step == iteration]
            assert found == [pytest.approx(value, rel=1e-5)], (name, iteration)


def test_tensorboard_is_the_default(monkeypatch, tmp_path, tiny_llama_dir):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    fit(monkeypatch, tmp_path, "tensorboard", config)
    assert list(tmp_path.glob("run/lightning_logs/version_0/events.out.tfevents.*"))


def test_several_loggers_at_once(monkeypatch, tmp_path, tiny_llama_dir):
    first, second = (config_of(k, tiny_llama_dir, tmp_path) for k in ("tensorboard", "csv"))
    both = [first["trainer"]["logger"], second["trainer"]["logger"]]
    fit(monkeypatch, tmp_path, "csv", changed(first, "trainer.logger", both))
    ours, theirs = tensorboard(tmp_path), comma_separated(tmp_path)
    names = set(measured(tmp_path)[1])
    assert names <= set(ours) & set(theirs)
    for name in names:
        assert theirs[name] == [(k, pytest.approx(v, rel=1e-5)) for k, v in ours[name]]
