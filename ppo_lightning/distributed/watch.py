"""Judges from what the ranks say whether this one waits in vain, and ends it then."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ppo_lightning.distributed.beats import Finding, Seen, end_of_others, found, judge
from ppo_lightning.distributed.heartbeat import Heartbeat, all_heard
from ppo_lightning.distributed.processes import is_stopped, kill

LOST_RANK = 75
"""Exit status of a run that has lost a rank: that of a failure which is worth another try."""
GRACE_SECONDS = 5.0
"""For the collective to raise by itself, once another rank is known to have ended."""


class Watch:
    """Ends this process where it would wait for ever, with a word about whom for.

    Args:
        heartbeat: Of this rank; not started yet.
        timeout: Seconds without a beat, or without progress while others wait, that are too many.
        advice: How the run goes on; asked for at its end.
        end: Ends the process.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        *,
        timeout: float,
        advice: Callable[[], str],
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.heartbeat, self.timeout, self.advice = heartbeat, timeout, advice
        self.grace = min(GRACE_SECONDS, timeout)
        self._end = end
        self._noticed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to beat and to watch."""
        self.heartbeat.start()
        self._thread.start()

    def pause(self) -> None:
        """Watch no more: the working thread has come back from what it waited in."""
        self._stopped.set()

    def stop(self) -> None:
        """Say the last word."""
        self.pause()
        self.heartbeat.stop()

    def leave(self) -> None:
        """End regularly; rank 0, whose store the others need, waits for them a while."""
        self.pause()
        self.heartbeat.say("ended")
        if self.heartbeat.rank == 0:
            self._wait_until_heard()
        self.heartbeat.stop()

    def fail(self, message: str) -> None:
        """Tell the others of an error of this rank's own."""
        self.pause()
        self.heartbeat.say("failed", message)
        self._wait_until_heard()
        self.heartbeat.stop()

    def explain(self, raw: str) -> str:
        """Say why a collective has failed; the others are told the same.

        Args:
            raw: First line of its own error.
        """
        self.pause()
        self.heartbeat.say("lost")
        finding = self.heartbeat.wait_until(self._cause, self.grace)
        if finding is None:
            finding = found("unknown", (), self.heartbeat.look())
            finding = Finding(kind="unknown", ranks=(), text=f"{finding.text} ({raw})")
        self._bury(finding)
        self.heartbeat.stop()
        return self._message(finding)

    def _run(self) -> None:
        while not self._stopped.wait(min(self.heartbeat.interval, 1.0)):
            finding = judge(self.heartbeat.look(), me=self.heartbeat.rank, timeout=self.timeout)
            if finding is None:
                continue
            if not self._in_vain(finding):
                self._notice(finding)
            elif not self._stopped.is_set():
                message = self._message(finding)
                _write(f"ppo-lightning: rank {self.heartbeat.rank} ends: {message}")
                self._bury(finding)
                self._end(LOST_RANK)
                return

    def _in_vain(self, finding: Finding) -> bool:
        """Whether this rank waits already; until then it may end by itself, or be done."""
        if finding.kind not in ("failed", "told", "gone"):
            return True
        mine = self.heartbeat.look()[self.heartbeat.rank]
        return mine.idle > self.grace

    def _notice(self, finding: Finding) -> None:
        """Say at once what is known: a launcher may kill this process before it can say more."""
        if not self._noticed and finding.kind == "gone":
            self._noticed = True
            _write(f"ppo-lightning: rank {self.heartbeat.rank} sees: {finding.text}")

    def _cause(self, seen: dict[int, Seen]) -> Finding | None:
        me, patience = self.heartbeat.rank, self._patience
        ended = end_of_others(seen, me=me)
        if ended is not None:
            return ended
        silent = [
            r for r, s in seen.items() if s.beat.state == "runs" and r != me and s.silent > patience
        ]
        return found("silent", silent, seen) if silent else None

    @property
    def _patience(self) -> float:
        """Seconds of silence that are strange, once something has gone wrong."""
        return min(self.timeout, 3 * self.heartbeat.interval)

    def _bury(self, finding: Finding) -> None:
        """Tell the others, and end processes of this machine that cannot do so themselves."""
        self.heartbeat.say("lost", finding.text)
        self._wait_until_heard()
        if finding.kind not in ("silent", "stuck"):
            return
        seen = self.heartbeat.look()
        for beat, silent in ((seen[r].beat, seen[r].silent) for r in finding.ranks):
            here = beat.machine == seen[self.heartbeat.rank].beat.machine
            if here and (silent > self.timeout or is_stopped(beat.pid)):
                kill(beat.pid, beat.birth)

    def _wait_until_heard(self) -> None:
        me, patience = self.heartbeat.rank, 3 * self.heartbeat.interval
        self.heartbeat.wait_until(lambda seen: all_heard(seen, me, patience), self.grace)

    def _message(self, finding: Finding) -> str:
        """Put the finding and the way on together; a file system that hangs is not waited for."""
        answer: list[str] = []
        thread = threading.Thread(target=lambda: answer.append(self.advice()), daemon=True)
        thread.start()
        thread.join(self.grace)
        return " ".join([finding.text, *answer])


def _write(text: str) -> None:
    """Write a line past Python's buffers: the process may be stuck with one of them locked."""
    os.write(2, f"\n{text}\n".encode())
