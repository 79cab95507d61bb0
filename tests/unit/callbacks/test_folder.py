from ppo_lightning.callbacks import set_aside


def test_earlier_files_get_the_next_free_number(tmp_path):
    path = tmp_path / "config.yaml"
    assert set_aside(path) is None
    for number in (1, 2):
        path.write_text(str(number), encoding="utf-8")
        assert set_aside(path) == tmp_path / f"config.{number}.yaml"
        assert not path.exists()
    kept = [(tmp_path / f"config.{n}.yaml").read_text(encoding="utf-8") for n in (1, 2)]
    assert kept == ["1", "2"]
