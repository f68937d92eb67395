"""What a run says on stderr."""

import io
import sys

import pytest

from dipole.core.utils import progress
from dipole.core.utils.progress import Progress, duration


def run(monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool) -> str:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream, clock = Stream(), iter(range(0, 1000, 4))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
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


def test_plain_lines_come_now_and_then_and_name_the_time_left(monkeypatch):
    lines = run(monkeypatch, terminal=False, quiet=False).splitlines()
    assert 2 <= sum(line.startswith("step 4") for line in lines) <= 5
    assert lines[0] == "step 43/100  loss 2.5"  # of two steps nothing is reckoned
    assert lines[1] == "step 46/100  loss 2.5  about 3m36s left"
    assert lines[-2:] == ["step 50: accuracy [1] 0.5", "warning: something"]
    monkeypatch.setenv("TERM", "dumb")
    lines = run(monkeypatch, terminal=True, quiet=False).splitlines()
    assert lines[0] == "step 43/100  loss 2.5"
    assert "\x1b" not in "".join(lines)


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
    assert lines[0] == "step 1/100"
    assert lines[-1] == "step 9/100  about 7m35s left"


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


def test_terminals_get_a_bar_and_quiet_keeps_only_warnings(monkeypatch):
    assert run(monkeypatch, terminal=False, quiet=True) == "warning: something\n"
    text = run(monkeypatch, terminal=True, quiet=False)
    assert "50/100" in text
    assert "step 50: accuracy [1] 0.5" in text


def test_a_notebook_gets_one_line_that_is_written_over(monkeypatch):
    """A kernel's stderr is no terminal, and shows what follows a carriage return in place of the line."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    clock = iter(range(1000))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    shown = Progress()
    shown.start("blobs", 100, 0)
    for step, text in ((1, {"train/loss": 2.123}), (2, {"train/loss": 2.0})):
        shown.values(text)
        shown.update(step)
    shown.note("step 2: accuracy 0.5")
    shown.update(3)
    shown.close()
    shown.close()
    first, second = stream.getvalue().split("\n")[0].split("\r")[1:]
    assert first.startswith("step 1/100  loss 2.123")
    assert second.startswith("step 2/100  loss 2  ")
    assert len(second) >= len(first)  # nothing of the longer line stays
    rest = stream.getvalue().split("\n")[1:]
    assert rest[0] == "step 2: accuracy 0.5"
    assert rest[1].startswith("\rstep 3/100")
    assert rest[2:] == [""]


def test_a_notebook_says_what_takes_a_while(monkeypatch):
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    shown = Progress()
    shown.start("SentEval", 2, 0, "task")
    shown.status("encoding 40 sentences")
    shown.status("scoring CR")
    shown.close()
    assert stream.getvalue() == f"\rencoding 40 sentences\r{'scoring CR':<21}\n"
    Progress(quiet=True).status("nothing")
    assert "nothing" not in stream.getvalue()


def test_no_bar_is_drawn_into_a_pipe_whatever_asks_for_colours(monkeypatch):
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    text = run(monkeypatch, terminal=False, quiet=False)
    assert text.startswith("step 43/100")
    assert "\x1b" not in text


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (42.4, "42s"), (130, "2m10s"), (7300, "2h01m")])
def test_durations(seconds, text):
    assert duration(seconds) == text
