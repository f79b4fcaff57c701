"""How far a capture is, for people: live on a terminal, plain lines elsewhere.

Rates are those of the traced run and are labelled so: they say when it will end, not how fast the
model is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType


class PlainProgress:
    """One line per stream when it starts generating and one when it is done, for logs and pipes."""

    def __init__(
        self, n_streams: int, n_done: int, max_tokens: int, check: Callable[[], None]
    ) -> None:
        self._n_streams, self._done, self._max_tokens, self._check = (
            n_streams,
            n_done,
            max_tokens,
            check,
        )
        self._name = ""
        self._started = self._first_token = 0.0
        self._n_prompt = self._n = self._n_here = 0
        self._begin = time.monotonic()

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish()

    def start(self, prompt_id: str, n_prompt: int) -> None:
        self._check()
        self._finish()
        self._name, self._n_prompt, self._n, self._started = (
            prompt_id,
            n_prompt,
            0,
            time.monotonic(),
        )

    def prefill(self, done: int, total: int) -> None:
        self._check()

    def token(self, n_generated: int) -> None:
        if n_generated == 1:
            self._first_token = time.monotonic()
        self._n = n_generated
        self._check()

    def _finish(self) -> None:
        if not self._name:
            return
        self._done += 1
        self._n_here += 1
        now = time.monotonic()
        rate = (self._n - 1) / max(now - self._first_token, 1e-9)
        left = (now - self._begin) / self._n_here * (self._n_streams - self._done)
        print(
            f"[{self._done}/{self._n_streams}] {self._name}: {self._n_prompt} + {self._n} tokens, "
            f"{rate:.1f} tokens/s traced, about {_duration(left)} left",
            file=sys.stderr,
            flush=True,
        )
        self._name = ""


class LiveProgress:
    """A bar over the streams and one over the stream in progress, with rate and time left."""

    def __init__(
        self, n_streams: int, n_done: int, max_tokens: int, check: Callable[[], None]
    ) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._check, self._max_tokens = check, max_tokens
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._all = self._bars.add_task("streams", total=n_streams, completed=n_done, rate="")
        self._one = self._bars.add_task("", total=None, rate="", visible=False)
        self._first_token = 0.0
        self._running = False

    def __enter__(self) -> LiveProgress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._running:
            self._bars.advance(self._all)
        self._bars.stop()

    def start(self, prompt_id: str, n_prompt: int) -> None:
        self._check()
        if self._running:
            self._bars.advance(self._all)
        self._running = True
        self._bars.reset(
            self._one, description=f"{prompt_id}: prompt", total=n_prompt, visible=True, rate=""
        )

    def prefill(self, done: int, total: int) -> None:
        self._bars.update(self._one, completed=done)
        self._check()

    def token(self, n_generated: int) -> None:
        now = time.monotonic()
        if n_generated == 1:
            self._first_token = now
            name = self._bars.tasks[self._one].description.removesuffix(": prompt")
            self._bars.reset(self._one, description=name, total=self._max_tokens)
        rate = (n_generated - 1) / max(now - self._first_token, 1e-9)
        self._bars.update(self._one, completed=n_generated, rate=f"{rate:.1f} tok/s traced")
        self._check()


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02} min" if hours else f"{m} min {s:02} s" if m else f"{s} s"
