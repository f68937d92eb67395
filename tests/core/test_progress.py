"""What a run says on stderr."""

import io
import itertools
import sys

import pytest

from dipole.core.utils import progress
from dipole.core.utils.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# A kernel's stderr is no terminal, and shows what follows a carriage return in place of the line.
Notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})


@pytest.fixture
def shown_on(monkeypatch):
    """Make a stream the stderr, with a clock that goes on by so many seconds each time it is read."""

    def use(stream, seconds=1):
        clock = itertools.count(0, seconds)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
        return stream

    return use


def run(stream: io.StringIO, quiet: bool = False) -> str:
    shown = Progress(quiet)
    shown.start("blobs [0]", 100, 40)
    for step in range(41, 51):
        shown.values({"train/loss": 2.5})
        shown.update(step)
    shown.status("evaluating")
    shown.note("step 50: accuracy [1] 0.5")
    shown.warn("warning: something")
    shown.close(50)
    shown.close()
    return stream.getvalue()


def test_plain_lines_come_now_and_then_and_name_the_time_left(monkeypatch, shown_on):
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")  # no bar is drawn into a pipe, whatever asks for colours
    text = run(shown_on(io.StringIO(), 4))
    lines = text.splitlines()
    assert 2 <= sum(line.startswith("step 4") for line in lines) <= 5
    assert lines[0] == "step 43/100  loss 2.5"  # of two steps nothing is reckoned
    assert lines[1] == "step 46/100  loss 2.5  about 3m36s left"
    assert lines[-2:] == ["step 50: accuracy [1] 0.5", "warning: something"]
    monkeypatch.setenv("TERM", "dumb")
    dumb = run(shown_on(Terminal(), 4))
    assert dumb.startswith("step 43/100  loss 2.5\n")
    assert "\x1b" not in text + dumb


def test_terminals_get_a_bar_and_quiet_keeps_only_warnings(shown_on):
    assert run(shown_on(io.StringIO(), 4), quiet=True) == "warning: something\n"
    text = run(shown_on(Terminal(), 4))
    assert "50/100" in text
    assert "step 50: accuracy [1] 0.5" in text


def test_no_time_is_reckoned_from_what_comes_before_the_first_step(monkeypatch):
    """An hour of evaluating, compiling and caching, then steps of five seconds."""
    stream, now = io.StringIO(), 0.0
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = Progress()
    shown.start("blobs", 100, 0)
    now += 3600
    for step in range(1, 11):
        shown.update(step)
        now += 5
    lines = stream.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("step 1/100", "step 9/100  about 7m35s left")


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_stream_that_takes_nothing_ends_no_work(stream, monkeypatch, capsys):
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    shown = Progress()
    shown.start("blobs", 10, 0)
    shown.update(1)
    shown.warn("warning: something")
    shown.close(1)
    assert capsys.readouterr().out == ""


def test_a_notebook_gets_one_line_that_is_written_over(shown_on):
    stream, shown = shown_on(Notebook()), Progress()
    shown.start("blobs", 100, 0)
    for step, loss in ((1, 2.123), (2, 2.0)):
        shown.values({"train/loss": loss})
        shown.update(step)
    shown.note("step 2: accuracy 0.5")
    shown.update(3)
    shown.close()
    shown.close()
    line, *rest = stream.getvalue().split("\n")
    first, second = line.split("\r")[1:]
    assert first.startswith("step 1/100  loss 2.123")
    assert second.startswith("step 2/100  loss 2  ")
    assert len(second) >= len(first)  # nothing of the longer line stays
    assert rest[0] == "step 2: accuracy 0.5"
    assert rest[1].startswith("\rstep 3/100")
    assert rest[2:] == [""]


def test_a_notebook_says_what_takes_a_while(shown_on):
    stream, shown = shown_on(Notebook()), Progress()
    shown.start("SentEval", 2, 0, "task")
    shown.status("encoding 40 sentences")
    shown.status("scoring CR")
    shown.close()
    Progress(quiet=True).status("nothing")
    assert stream.getvalue() == f"\rencoding 40 sentences\r{'scoring CR':<21}\n"


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (42.4, "42s"), (130, "2m10s"), (7300, "2h01m")])
def test_durations(seconds, text):
    assert duration(seconds) == text
