from ppo_lightning.callbacks import Throughput, Watchdog
from ppo_lightning.cli.callback_lists import settle


def test_the_later_of_two_watchdogs_is_used_and_said():
    first, second, other = Watchdog(timeout=None), Watchdog(timeout=60.0), Throughput()
    kept, said = settle([first, other, second])
    assert kept == [second, other]
    assert "Watchdog is there twice" in said[0]
