"""``ppo-lightning sweep`` with configs that the parser reads, and one real sweep."""

import re

import pytest
import yaml

from ppo_lightning.cli import sweep
from ppo_lightning.cli.sweep_config import SweepConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.io import read_json
from ppo_lightning.metrics import read_metrics
from ppo_lightning.studies import read_state
from tests.helpers.cli import run_cli, tiny_config, write_config
from tests.helpers.sweeps import FakeRunner

ARGS = "model.init_args"
SCORE = "val/sampled/score"
JUDGE = "{class_path: ppo_lightning.rewards.TargetLengthReward, init_args: {target_tokens: 9}}"
CHECKPOINTS = "[{class_path: ModelCheckpoint, init_args: {dirpath: here}}]"


@pytest.fixture
def config(tiny_llama_dir, tmp_path):
    return write_config(tmp_path / "c.yaml", tiny_config(tiny_llama_dir, tmp_path / "unused"))


def test_arms_are_read_as_fit_reads_them(monkeypatch, config, capsys):
    read = SweepConfig(["--config", str(config), "--model.actor.lr=1e-5"])
    settings = {"model.kl.coef": 0.2, "model.rewards[length].weight": 2, f"{ARGS}.gold": None}
    resolved = read.resolve(settings)
    options = ["--model.actor.lr=1e-5", "--model.kl.coef=0.2", "--model.rewards[length].weight=2"]
    capsys.readouterr()
    assert run_cli(monkeypatch, "fit", "--config", config, *options, "--print_config") == 0
    assert resolved == yaml.safe_load(capsys.readouterr().out)
    assert read.resolve({}) == read.base
    assert read.base["model"]["init_args"]["kl"]["coef"] == 0.05
    assert (read.name, read.seed) == ("c", 1)
    with pytest.raises(ConfigError, match=r"did you mean `clip_range`\?"):
        read.resolve({"model.ppo.clip_rnge": 0.1})
    assert read.resolve(settings) == resolved  # also after an error


def test_the_best_judge_is_the_default(config):
    def metric(*options, wanted=None):
        return SweepConfig(["--config", str(config), *options]).metric(wanted)

    assert metric() == SCORE
    assert metric(f"--model.gold={JUDGE}") == "val/sampled/gold"
    assert metric("--model.validation.num_samples=0") == "val/greedy/score"
    assert metric("--data.val_prompts=null") == "rollout/score_mean"
    assert metric(wanted="rollout/reward/length/raw") == "rollout/reward/length/raw"
    with pytest.raises(ConfigError, match=r"do not log it\. Did you mean `val/sampled/score`\?"):
        metric(wanted="val/sampled/gold")


REFUSED = [
    (("--vary=model.ppo.clip_rnge=0.1",), "did you mean `clip_range`?"),
    (("--vary=model.ppo.clip_range=0.1,wide",), "`--vary model.ppo.clip_range=wide`: "),
    (("--vary=model.kl.coef=0.1", f"--trainer.callbacks={CHECKPOINTS}"), "into one folder"),
    (("--vary=model.kl.coef=0.1", "--seed_everything=true"), "a seed of its own: give those"),
    (("--vary=model.kl.coef=0.1", "--proceses=2"), "proceses"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_is_refused_before_any_run(monkeypatch, config, tmp_path, capsys, options, said):
    runner = FakeRunner(lambda run: [0.0])
    monkeypatch.setattr(sweep, "make_runner", lambda asked, lock: runner)
    options = ("--config", config, "--out", tmp_path / "out", *options)
    assert run_cli(monkeypatch, "sweep", *options) == 2
    assert said in capsys.readouterr().err
    assert runner.made == []
    assert not (tmp_path / "out").exists()


def test_other_modules_are_not_swept(tiny_llama_dir):
    model = f"{{class_path: SFTModule, init_args: {{policy: {{path: {tiny_llama_dir}}}}}}}"
    data = "{class_path: ppo_lightning.data.SFTDataModule, init_args: {demonstrations: x.jsonl}}"
    with pytest.raises(ConfigError, match="PPO runs are swept, and the config has a SFTModule"):
        SweepConfig([f"--model={model}", f"--data={data}"])


@pytest.mark.slow
def test_a_real_sweep_of_two_arms(monkeypatch, config, tmp_path, capsys):
    vary = f"--vary=model.rewards[length].component={JUDGE}"
    options = ("--config", config, "--out", tmp_path / "out", vary, "--processes=2", "--last=1")
    assert run_cli(monkeypatch, "sweep", *options) == 0, capsys.readouterr().err
    found = {arm["name"]: arm for arm in read_json(tmp_path / "out/sweep.json")["arms"]}
    folders = {name: tmp_path / "out" / name / "seed_1" for name in found}
    base, other = found
    assert base == "base"
    assert re.fullmatch(r"component=TargetLengthReward-\w{6}", other)
    for name, folder in folders.items():
        rows = read_metrics(folder / "metrics.jsonl")
        assert [row.iteration for row in rows] == [0, 1]
        assert found[name]["metric"]["mean"] == pytest.approx(rows[-1].val_sampled.score)
        assert read_state(folder).attempts == 1
        assert (folder / "checkpoints/last.ckpt").is_file()
        assert list(folder.glob("events.out.tfevents.*"))
        saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        target = saved["model"]["init_args"]["rewards"][0]["component"]["init_args"]
        assert target["target_tokens"] == (3 if name == base else 9)
        assert saved["seed_everything"] == 1
    page = (tmp_path / "out/sweep.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_its_checkpoint(monkeypatch, config, tmp_path, capsys):
    """A reward that kills its process once stands in for a machine that fails."""
    once = tmp_path / "killed"
    (tmp_path / "killing.py").write_text(
        "import os, signal, pathlib\n"
        "def score(responses, once, out):\n"
        "    begun = list(pathlib.Path(out).glob('component*/seed_1/checkpoints/last.ckpt'))\n"
        "    if begun and not pathlib.Path(once).exists():\n"
        "        pathlib.Path(once).touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [0.0 for _ in responses]\n",
        encoding="utf-8",
    )
    arguments = f"{{once: {once}, out: {tmp_path / 'out'}}}"
    settings = f"{{function: '{tmp_path}/killing.py:score', arguments: {arguments}}}"
    value = f"{{class_path: ppo_lightning.rewards.FunctionReward, init_args: {settings}}}"
    vary = f"--vary=model.rewards[length].component={value}"
    options = ("--config", config, "--out", tmp_path / "out", vary, "--processes=2")
    assert run_cli(monkeypatch, "sweep", *options) == 1
    shown = capsys.readouterr()
    assert "killed by SIGKILL" in shown.out
    assert run_cli(monkeypatch, "sweep", *options) == 0, capsys.readouterr().err
    [folder] = (tmp_path / "out").glob("component*/seed_1")
    assert [row.iteration for row in read_metrics(folder / "metrics.jsonl")] == [0, 1]
    log = (folder / "run.log").read_text(encoding="utf-8")
    assert "iteration 1/2" in log.split("iteration 2/2")[0]
    assert log.count("iteration 1/2") == 1
    assert read_state(folder).attempts == 2
    assert read_state(tmp_path / "out/base/seed_1").attempts == 1
