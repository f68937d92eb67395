"""Input from strangers: values, mutations of what dipole writes, and things that only look like files."""

import copy
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dipole.core.train.config import toml_text
from dipole.core.utils.errors import DipoleError
from tests.systems import POSIX

ODD: list[Any] = [
    None, True, -1, 0, 2**70, 10**400, -(10**4000), 0.5, 1e308, -1e308, float("nan"), float("inf"), "", "x", "x" * 5000,
    "../..", "\0", "=1+1", "<script>", "\ud800", "\N{ARABIC-INDIC DIGIT ONE}", [], [[]], [None], {}, {"": {}}, {"a": 1},
]  # fmt: skip


def settings_of(examples: int, is_quick: bool) -> settings:
    """No deadline of hypothesis's own, as `answered` has one. Quick ones are the same every time."""
    health = list(HealthCheck)
    return settings(max_examples=examples, deadline=None, suppress_health_check=health, derandomize=is_quick)


def answered(call: Callable[[], Any]) -> None:
    """The call gives a value, or an error of ours of less than 2,000 characters, within a second of the processor."""
    begin = time.process_time()
    said = ""
    gc.disable()  # what 10,000 examples before it have left is not its own
    try:
        call()
    except DipoleError as error:
        said = str(error)
    finally:
        gc.enable()
    assert len(said) < 2000
    assert time.process_time() - begin < 1


def places(value: Any, most: int = 4) -> list[tuple[Any, ...]]:
    """Paths of everything within a value of mappings and lists, of at most so many keys."""
    found: list[tuple[Any, ...]] = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs if most else ():
        found += [(key,), *((key, *rest) for rest in places(inner, most - 1))]
    return found


def changed(value: Any, place: tuple[Any, ...], to: Any = ..., name: str | None = None) -> Any:
    """A copy with something else at a place, nothing for `...`, or the same under another name."""
    found = copy.deepcopy(value)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    if name is not None and isinstance(inner, dict):
        inner[name] = inner.pop(place[-1])
    elif to is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = to
    return found


def mutations(value: Any) -> st.SearchStrategy[Any]:
    """The value with one to three things changed, removed or renamed."""

    @st.composite
    def drawn(draw: st.DrawFn) -> Any:
        found = value
        for _ in range(draw(st.integers(1, 3))):
            if there := places(found):
                place = draw(st.sampled_from(there))
                name = draw(st.one_of(st.none(), st.none(), st.text(max_size=5)))
                found = changed(found, place, draw(st.sampled_from([..., *ODD])), name)
        return found

    return drawn()


def contents(value: Any) -> st.SearchStrategy[bytes]:
    """JSON of mutations of a value, that text with a piece of it replaced, and anything at all."""
    whole = json.dumps(value).encode()
    pieces = st.sampled_from(
        [b"", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"NaN", b"-Infinity", b"\xff", b'"', b"\\ud800"]
    )

    @st.composite
    def cut(draw: st.DrawFn) -> bytes:
        first, last = sorted((draw(st.integers(0, len(whole))), draw(st.integers(0, len(whole)))))
        return whole[:first] + draw(pieces) + whole[last:]

    return st.one_of(mutations(value).map(lambda found: json.dumps(found).encode()), cut(), st.binary(max_size=50))


def toml_contents(value: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """TOML of mutations of a value, in half of the cases with a piece of something else in it."""
    odd = [b"", b"[" * 3000, b"\xff", b"=", b'"', b"a." * 500, b"9" * 5000, b"\n[[train]]\n", b"\nseed = 1\n"]

    def text(found: Any) -> bytes | None:
        try:
            return toml_text(found).encode()
        except Exception:  # what has no TOML: None, half a surrogate pair
            return None

    @st.composite
    def drawn(draw: st.DrawFn) -> bytes:
        found = draw(mutations(value))
        whole = text(found) or repr(found).encode(errors="replace")
        place = draw(st.integers(0, len(whole)))
        return whole[:place] + draw(st.sampled_from(odd)) + whole[place:]

    return st.one_of(drawn(), mutations(value).map(text).filter(bool))


NO_FILES: dict[str, Callable[[Path], Any]] = {
    **({"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")} if POSIX else {}),
    "folder": Path.mkdir,
    "sparse": lambda path: (path.touch(), os.truncate(path, 10 * 2**30)),
    "loop": lambda path: path.symlink_to(path.name),
    "deep": lambda path: path.write_text("[" * 100_000),
    "long": lambda path: path.write_text("a" * 2_000_000 + "\n"),
}
"""Things that may stand where a file is expected, by what they are."""
