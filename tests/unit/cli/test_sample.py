"""How prompts are put and sampled: as the run did, unless an option says otherwise."""

import pytest

from ppo_lightning.checkpointing.contents import _prompting
from ppo_lightning.cli.main import main
from ppo_lightning.cli.sample import _as_wished, _Manner, parser
from ppo_lightning.configs import SamplingConfig

RUN = _Manner(SamplingConfig(max_new_tokens=9, min_new_tokens=5), False, "Be brief.")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (False, "Be brief.", 9, 5)),
        (["--chat", "true"], (True, "Be brief.", 9, 5)),
        (["--chat", "auto", "--system-prompt", "Hm."], ("auto", "Hm.", 9, 5)),
        (["--system-prompt", ""], (False, None, 9, 5)),
        (["--max-new-tokens", "3"], (False, "Be brief.", 3, 3)),
    ],
)
def test_options_override_the_run_one_by_one(options, expected):
    found = _as_wished(RUN, parser().parse_args(["run.ckpt", *options]))
    lengths = (found.sampling.max_new_tokens, found.sampling.min_new_tokens)
    assert (found.chat, found.system_prompt, *lengths) == expected


def test_a_checkpoint_tells_how_prompts_were_put_whatever_its_data_module_is_called():
    state = {"position": 3, "seed": 0, "chat": True, "system_prompt": None}
    found = _prompting({"epoch": 1, "state_dict": {}, "MyPrompts": state})
    assert found == {"chat": True, "system_prompt": None}
    assert _prompting({"epoch": 1, "RolloutDataModule": {"position": 3, "seed": 0}}) == {}


def test_a_checkpoint_that_is_not_there_is_no_hub_name(capsys):
    assert main(["sample", "runs/nope.ckpt", "--prompt", "hello"]) == 2
    said = capsys.readouterr().err
    assert said == "ppo-lightning: the checkpoint `runs/nope.ckpt` does not exist.\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "zzz"], "`--device zzz` cannot be used ("),
        (["--device", "meta"], "`--device meta` cannot be used ("),
        (["--temperature", "0"], "`--temperature` must be above 0, got 0: `--greedy` takes"),
        (["--max-new-tokens", "500"], "`--max-new-tokens` must be below 128, the positions of"),
    ],
)
def test_options_that_cannot_be_used_are_named(tiny_gpt2_dir, capsys, options, said):
    assert main(["sample", str(tiny_gpt2_dir), "--prompt", "hello", *options]) == 2
    assert f"ppo-lightning: {said}" in capsys.readouterr().err
