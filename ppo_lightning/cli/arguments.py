"""Options of the helper commands: plain argparse, with errors of one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from typing_extensions import override

from ppo_lightning.errors import ConfigError, nearest


class Arguments(argparse.ArgumentParser):
    """A parser that raises ``ConfigError`` instead of printing its usage and exiting."""

    def __init__(self, **options: str) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    @override
    def error(self, message: str) -> NoReturn:
        stray = message.removeprefix("unrecognized arguments: ").split()[0]
        known = [option for action in self._actions for option in action.option_strings]
        near = nearest(stray, known) if stray.startswith("-") else None
        hint = f" Did you mean `{near}`?" if near else ""
        raise ConfigError(f"{message}.{hint}\n`{self.prog} --help` lists the options.")
