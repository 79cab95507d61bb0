"""What ``estimate`` prints, and how it refuses."""

import json

import pytest

from ppo_lightning.cli.main import main
from ppo_lightning.estimate import ARCHITECTURES, Architecture, Estimate, Estimator, StagePeak
from tests.helpers.cli import changed, run_cli, tiny_config, write_config
from tests.helpers.tiny_models import build_llama


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """One block: more of them are more of the same operations. Two ranks can share it."""
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    return build_llama(folder, num_hidden_layers=1, num_key_value_heads=2)


@pytest.fixture
def config(policy, tmp_path):
    return tiny_config(policy, tmp_path / "run")


@pytest.fixture
def remembering(monkeypatch):
    """One estimator for all calls, which remembers the passes of runs that it has seen."""
    shared = Estimator()
    monkeypatch.setattr("ppo_lightning.estimate.Estimator", lambda: shared)


@pytest.fixture
def tell(monkeypatch, tmp_path, capsys):
    def run(config, *options):
        path = write_config(tmp_path / "c.yaml", config)
        code = run_cli(monkeypatch, "estimate", "--config", path, *options)
        return code, capsys.readouterr()

    return run


def test_a_row_for_each_part_and_the_stage_of_the_peak(tell, config):
    code, said = tell(config)
    assert code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith("Peak memory in MB: prompts of 4 and responses of 4 tokens")
    assert lines[2].split() == ["load", "rollout", "reward", "scoring", "update"]
    rows = [line[:17].strip() for line in lines[3 : lines.index("", 3)]]
    assert rows[:4] == ["actor", "critic", "reference", "optimiser states"]
    assert rows[-3:] == ["libraries", "heap", "total"]
    assert "peak: " in said.out
    assert "heap" in lines[-1]


def test_options_of_fit_follow_and_prompts_need_not_be_read(tell, config):
    config = changed(config, "data.init_args.prompts", "nowhere.jsonl")
    options = ["--prompt-tokens", "7", "--model.sampling.max_new_tokens", "9", "--json"]
    code, said = tell(config, *options)
    found = json.loads(said.out)
    assert code == 0
    assert (found["prompt_tokens"], found["response_tokens"]) == (7, 9)
    assert found["peak"]["bytes"] == max(sum(s.values()) for s in found["stages"].values())


def test_nothing_is_written_or_loaded(tell, config, tmp_path, monkeypatch):
    monkeypatch.setattr("ppo_lightning.models.weights.require_finite", None)  # of loaded weights
    assert tell(config)[0] == 0
    assert not (tmp_path / "run").exists()


# The search is in test_changes.py, and what is said of it in the test on a GPU below.
@pytest.mark.slow
@pytest.mark.usefixtures("remembering")
def test_what_fits_is_said_and_what_does_not_is_mended(tell, config):
    assert tell(config, "--fit", "2")[1].out.splitlines()[-1].startswith("It fits 2048 MB: ")
    # Long responses: nearly all is theirs, and shorter microbatches make room.
    config = changed(config, "model.init_args.sampling.max_new_tokens", 100)
    config = changed(config, "data.init_args.buffer", {"num_prompts": 64, "num_minibatches": 1})
    whole = json.loads(tell(config, "--json")[1].out)["peak"]["bytes"]
    code, said = tell(config, "--json", "--fit", str(0.8 * whole / 2**30))
    found = json.loads(said.out)
    assert code == 1
    assert not found["fits"]
    assert found["bytes_together"] <= found["limit"]
    assert found["together"].keys() == {"model.init_args.ppo.microbatch_tokens"}
    text = tell(config, "--fit", str(0.8 * whole / 2**30))[1].out
    assert "It does not fit" in text
    assert text.splitlines()[-1].strip().startswith("--model.ppo.microbatch_tokens ")


class Shrinking:
    """Counts less for each run that it has not seen yet, so that every change saves something."""

    def __init__(self):
        self.runs = []

    def __call__(self, run):
        if run not in self.runs:
            self.runs.append(run)
        size = 2**30 - 2**20 * self.runs.index(run)
        return Estimate(stages=(StagePeak(name="load", parts={"actor": size}),), device=run.device)


def test_the_options_that_are_told_are_those_of_fit(tell, config, monkeypatch):
    """Given as they are told, they make the run that the saving is of."""
    estimator = Shrinking()
    monkeypatch.setattr("ppo_lightning.estimate.Estimator", lambda: estimator)
    config = changed(config, "model.init_args.sampling.max_new_tokens", 100)
    config = changed(config, "data.init_args.buffer", {"num_prompts": 64, "num_minibatches": 1})
    told = tell(config, "--fit", "0.001")[1].out.splitlines()
    options = [line.split()[2:] for line in told if " MB  --" in line]
    assert len(options) > 3
    tried = estimator.runs[1:]
    for option in options:
        words = [word for word in option if not word.startswith("(")]
        given = words[: 2 * sum(word.startswith("--") for word in words)]
        estimator.runs = []
        assert tell(config, *given)[0] == 0
        assert estimator.runs[0] in tried


def test_a_run_of_several_ranks_and_another_device(tell, config):
    trainer = config["trainer"] | {"accelerator": "gpu", "devices": 2}
    code, said = tell(config | {"trainer": trainer})
    assert code == 0
    assert "4 responses in 2 minibatches on 2 ranks (ddp), the memory of one." in said.out
    assert "heap" not in said.out


SFT = {
    "class_path": "ppo_lightning.modules.SFTModule",
    "init_args": {"policy": {"path": "x"}},
}


@pytest.mark.parametrize(
    ("key", "value", "options", "said"),
    [
        ("model", SFT, [], "`model`: memory is estimated for a PPOModule only"),
        ("model.init_args.policy.path", "./nowhere", [], "`./nowhere` does not exist."),
        ("trainer.accelerator", "tpu", [], "`trainer.accelerator: tpu`: memory is estimated for"),
        ("trainer.precision", "bf16-true", [], "`precision` must be one of 32-true"),
        ("trainer.max_epochs", 1, ["--fit", "0"], "`--fit` must be above 0 GB, got 0."),
        ("trainer.max_epochs", 1, ["--prompt-tokens", "0"], "`--prompt-tokens` must be at least 1"),
        ("trainer.max_epochs", 1, ["--model.ppo.clip_rang", "1"], "clip_rang"),
        ("model.init_args.ppo.clip_range", 7, [], "c.yaml:12: in `model.init_args.ppo`: `clip_r"),
    ],
)
def test_what_cannot_be_used_is_named(tell, config, key, value, options, said):
    code, printed = tell(changed(config, key, value), *options)
    assert code == 2
    assert printed.err.startswith("ppo-lightning: ")
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_a_config_that_is_not_there(capsys):
    assert main(["estimate", "--config", "nowhere.yaml"]) == 2
    assert "the config file `nowhere.yaml` does not exist." in capsys.readouterr().err


# ---------------------------------------------------------------------- clusters

FSDP = ["--trainer.strategy", "fsdp", "--trainer.devices", "4", "--trainer.accelerator", "gpu"]


def test_a_cluster_is_told_memory_traffic_and_time(tell, config):
    code, said = tell(config, *FSDP)
    assert code == 0
    assert "on 4 ranks (fsdp), the memory of one." in said.out
    assert "\ngathered " in said.out
    assert "heap" not in said.out
    assert "Sent by each rank in an iteration" in said.out
    assert "weights for the rollout" in said.out
    assert "response tokens a second over all ranks" in said.out
    assert "Not measured. It assumes GPUs of 989 teraflops" in said.out
    assert "It fits 67.1 GB" in said.out  # 90 % of 80e9 bytes


@pytest.mark.usefixtures("remembering")
def test_what_each_option_of_a_cluster_changes(tell, config):
    def told(*options):
        return json.loads(tell(config, "--json", *FSDP, *options)[1].out)

    base, other = told(), told("--hardware", "h200", "memory_share=0.5", "network_bandwidth=1e9")
    assert (base["strategy"], base["ranks"], base["limit"]) == ("fsdp", 4, int(0.9 * 80e9))
    assert other["limit"] == int(0.5 * 141e9)
    assert other["seconds"]["rollout"] < base["seconds"]["rollout"]  # faster memory
    pushed = told("--asynchronous")["sent_bytes"]
    assert pushed.keys() - base["sent_bytes"].keys() == {"weights to a generator"}
    tensor = told("--tensor-parallel", "2")
    assert tensor["strategy"] == "fsdp, tensor 2"
    assert "tensor parallel" in tensor["sent_bytes"]
    nodes = told("--trainer.num_nodes", "4")
    assert nodes["ranks"] == 16
    load = [sum(one["stages"]["load"].values()) for one in (base, nodes)]
    assert load[1] == pytest.approx(load[0] / 4, rel=0.01)


def test_a_strategy_by_its_class(tell, config):
    strategy = {
        "class_path": "ppo_lightning.modules.FSDP2Strategy",
        "init_args": {"tensor_parallel_size": 2},
    }
    trainer = config["trainer"] | {"accelerator": "gpu", "devices": 4, "strategy": strategy}
    found = json.loads(tell(config | {"trainer": trainer}, "--json")[1].out)
    assert found["strategy"] == "fsdp, tensor 2"


def test_a_model_that_is_not_on_the_disk(tell, config, monkeypatch):
    small = {"tiny": Architecture(**(vars(ARCHITECTURES["llama-3.2-1b"]) | {"layers": 3}))}
    monkeypatch.setattr("ppo_lightning.estimate.architectures.ARCHITECTURES", small)
    config = changed(config, "model.init_args.policy.path", "./nowhere")
    options = ["--architecture", "tiny", "--prompt-tokens", "8", "--trainer.accelerator", "auto"]
    code, said = tell(config, "--json", *options)
    found = json.loads(said.out)
    assert (code, found["device"], found["ranks"]) == (0, "cuda", 1)
    assert found["stages"]["load"]["actor"] >= 4 * small["tiny"].parameters


@pytest.mark.usefixtures("remembering")
def test_what_does_not_fit_a_gpu_is_told_with_the_way_out(tell, config):
    options = [*FSDP[2:], "--trainer.strategy", "ddp", "--hardware"]
    found = json.loads(tell(config, "--json", *options, "h100")[1].out)
    peak = found["peak"]["bytes"]
    code, said = tell(config, *options, f"memory={0.95 * peak}", "memory_share=1")
    assert code == 1
    assert "It does not fit" in said.out
    assert "--trainer.strategy fsdp" in said.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--trainer.strategy", "xla"], "`trainer.strategy: xla` cannot be estimated: set one of"),
        (["--tensor-parallel", "2"], "tensor parallel goes with `fsdp`"),
        ([*FSDP, "--tensor-parallel", "3"], "`--tensor-parallel 3` does not divide"),
        ([*FSDP, "--tensor-parallel", "0"], "`--tensor-parallel` must be at least 1, got 0."),
        (["--architecture", "llama-3.1-8b"], "give `--prompt-tokens N`"),
        (["--architecture", "x", "--prompt-tokens", "4"], "`--architecture x` is not known"),
        (["--hardware", "h100", "--device", "cpu"], "`--hardware` is about GPUs"),
        (["--hardware", "h100"], "`--hardware` is about GPUs, and `trainer.accelerator` is `cpu`"),
        (["--hardware", "tpu"], "`--hardware tpu` is not known"),
        (["--trainer.num_nodes", "2", "--trainer.devices", "auto"], "leaves open how many GPUs"),
        (["--trainer.num_nodes", "0"], "`trainer.num_nodes` must be at least 1, got 0."),
    ],
)
def test_what_cannot_be_a_cluster_is_named(tell, config, options, said):
    code, printed = tell(config, *options)
    assert code == 2
    assert printed.err.startswith("ppo-lightning: ")
    assert said in printed.err
