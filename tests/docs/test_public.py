"""Every public name says what it is; each rule of what a docstring must say is broken on purpose."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import docstrings
import public
import pytest
from pydantic import BaseModel, Field
from torch import Tensor

from dipole.core.utils.errors import OptionError


@pytest.fixture
def domains() -> None:
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sentence_transformers")


@pytest.mark.usefixtures("domains")
def test_every_public_docstring_says_what_it_must() -> None:
    assert docstrings.problems() == []


@pytest.mark.usefixtures("domains")
def test_what_packages_export_pages_import_and_functions_return_is_public() -> None:
    names = public.public_names()
    assert names["dipole.objective"][0] == "dipole.core.objectives.objective.objective"
    assert {"dipole.text.ContrastiveLoss", "dipole.rl.ContrastiveSAC", "dipole.Pairs"} <= set(names)
    assert "dipole.parametrize_with_checks" in names
    assert "dipole.core.train.adapter.Adapter" in names  # tests/plugin/example imports it
    assert "dipole.reference.total" in names
    assert "dipole.core.objectives.cached.Cached" in names  # `dipole.cached` returns it
    assert "dipole.core.objectives.evaluate.TermValue" in names  # `Outcome`, which objectives return, has some
    assert "dipole.core.utils.seeding.Seeds" in names  # a key of `Context`
    assert {"dipole.DipoleError", "dipole.rl.pixel_agent.PixelAgent"} <= set(names)
    assert "dipole.core.utils.errors.nearest" not in names  # not in the module's __all__
    assert "dipole.__version__" not in names
    assert len({place for place, _ in names.values()}) == len(names)


@pytest.mark.usefixtures("domains")
def test_methods_of_private_bases_and_objectives_are_looked_at() -> None:
    names = {each.name for each in public.entries()}
    assert "dipole.core.train.run.Run.advance" in names
    assert "dipole.rl.ContrastiveSAC.learn" not in names  # of PixelAgent, which has one
    assert {"infonce", "dipole.text.senteval.SE.eval", "dipole.Composite.forward"} <= names


def entry(value: Any) -> public.Entry:
    (found,) = public._entry("thing", value)
    return found


def method(owner: type, name: str) -> public.Entry:
    return next(each for each in public.members(entry(owner)) if each.name == f"thing.{name}")


def documented(text: str) -> Callable[[Any], Any]:
    def put(function: Any) -> Any:
        function.__doc__ = text
        return function

    return put


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("One sentence.", True),
        ("One that goes on\nin a second line.", True),
        ("", False),
        ("TODO", False),
        ("x", False),
    ],
)
def test_what_counts_as_a_sentence(text: str, told: bool) -> None:
    @documented(text)
    def function() -> None: ...

    assert (docstrings.no_sentence(entry(function)) is None) is told


class Base:
    """A base."""

    def said(self) -> None:
        """Says something."""


class Derived(Base):
    """A class."""

    def said(self) -> None: ...

    def unsaid(self) -> None: ...

    @functools.cached_property
    def kept(self) -> int:
        return 1

    def _private(self) -> None: ...


def test_a_method_without_a_docstring_is_named_unless_a_base_has_one() -> None:
    assert list(docstrings.broken(method(Derived, "said"))) == []
    assert docstrings.documented_at(method(Derived, "said")) is Base
    for name in ("unsaid", "kept"):
        assert "no docstring of its own" in next(docstrings.broken(method(Derived, name)))
    assert not any("_private" in each.name for each in public.members(entry(Derived)))


def test_an_argument_needs_a_line_of_its_own() -> None:
    class Width:
        """A thing of some width.

        Args:
            width: known.
        """

    class Thing(Width):
        """A thing of a width, a height and a depth.

        Args:
            height: known.
        """

        def __init__(self, width: int, height: int, depth: int, *rest: int, _hidden: int = 0) -> None: ...

    assert docstrings.unexplained(entry(Thing)) == "Args has no line for width, depth"

    @dataclass
    class Data:
        """Data.

        Args:
            one: known.
        """

        one: int
        two: int

    class Row(NamedTuple):
        """A row."""

        one: int

    class Table(BaseModel):
        """A table."""

        one: int = Field(0, description="known")
        two: int = 0

    assert docstrings.unexplained(entry(Data)) == "Args has no line for two"
    assert docstrings.unexplained(entry(Row)) == "Args has no line for one"
    assert docstrings.unexplained(entry(Table)) == "Args has no line for two"


@pytest.mark.parametrize(
    ("line", "shaped"),
    [
        ("(A, d) rows.", True),
        ("numbers, () each.", True),
        ("(n >= 2, d).", True),
        ("(...), of any shape.", True),
        ("(B, ...) of an encoder.", True),
        ("as in `other`.", True),
        ("rows (of a batch).", False),
        ("rows of `f(x)`.", False),
        ("rows.", False),
    ],
)
def test_a_tensor_needs_a_shape(line: str, shaped: bool) -> None:
    @documented(f"A sum, ().\n\nArgs:\n    x: {line}\n    use: a function.\n")
    def given(x: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor: ...

    @documented(f"A sum.\n\nArgs:\n    x: (n,).\n    use: a function.\n\nReturns:\n    {line}\n")
    def returned(x: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor: ...

    assert docstrings.shapeless_arguments(entry(given)) == (None if shaped else "Args has no shape of x")
    if not line.startswith("as in"):
        assert (docstrings.shapeless_results(entry(returned)) is None) is shaped


def test_what_is_returned_is_said() -> None:
    @documented("Read a file.")
    def read() -> int: ...

    @documented("The number in a file.")
    def number() -> int: ...

    @documented("Read a file.\n\nReturns:\n    Its number.\n")
    def both() -> int: ...

    assert docstrings.unsaid_results(entry(read)) == "it says nothing of what it returns, int"
    assert docstrings.unsaid_results(entry(number)) is None
    assert docstrings.unsaid_results(entry(both)) is None


class Raising:
    """A class.

    Raises:
        TypeError: from any method.
    """

    def method(self) -> None:
        """Does something."""
        raise TypeError

    def other(self, error: Exception) -> Any:
        """Does something.

        Raises:
            OptionError: here.
        """
        if error:
            raise error

        def later() -> None:
            raise KeyError

        later()

        def decorate() -> None:
            raise ValueError

        if self:
            raise OptionError("no")
        return decorate


def test_what_is_raised_is_said() -> None:
    assert docstrings.unraised(method(Raising, "method")) is None
    assert docstrings.unraised(method(Raising, "other")) == "Raises has no line for ValueError"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("TypeError: here.", None),
        ("TypeError: here; a ValueError is another thing.", None),
        ("TypeError: here. ValueError: there.", "Raises has ValueError in the line of another error"),
        ("TypeError: here; ValueError if there.", "Raises has ValueError in the line of another error"),
        ("TypeError, ValueError: here.", "Raises has ValueError in the line of another error"),
    ],
)
def test_an_error_has_a_line_of_its_own(line: str, said: str | None) -> None:
    @documented(f"A function.\n\nRaises:\n    {line}\n")
    def function() -> None: ...

    assert docstrings.crowded_raises(entry(function)) == said


@pytest.mark.usefixtures("domains")
def test_an_error_that_is_named_has_a_page() -> None:
    @documented(
        "A function.\n\nRaises:\n    OptionError: here.\n    KeyError: here.\n    a.OddError: here.\n    OddError: x."
    )
    def function() -> None: ...

    assert docstrings.unknown_errors(entry(function)) == "Raises names OddError, which no page has"


@pytest.mark.parametrize("head", ["Formula (Arora et al. 2019, Sec. 8.1):", "Formula (LMCL Eqs. 7-10), D = 1:"])
def test_a_formula_has_a_source(head: str) -> None:
    @documented(f"A function.\n\n{head}\n    L = 0\n")
    def sourced() -> None: ...

    @documented("A function.\n\nFormula:\n    L = 0\n")
    def bare() -> None: ...

    assert docstrings.sourceless(entry(sourced)) is None
    assert docstrings.sourceless(entry(bare)) == "it says no paper and equation at 'Formula:'"


def test_all_that_a_module_defines_is_public_where_it_names_nothing() -> None:
    module = ModuleType("some.module")
    for name, place in (("own", "some.module"), ("_own", "some.module"), ("other", "elsewhere")):
        value = type(name, (), {"__module__": place})
        setattr(module, name, value)
    assert public.exports(module) == ["own"]
    module.__all__ = ["other"]  # type: ignore[attr-defined]
    assert public.exports(module) == ["other"]


@pytest.fixture
def hooks(domains: None) -> Any:
    return pytest.importorskip("hooks", exc_type=ImportError)


def test_a_page_for_each_package(hooks: Any) -> None:
    rooms = hooks.rooms()
    assert "dipole.rl.sampling.FrameBatch" in rooms["dipole.rl"]
    assert "dipole.rl.episodes.evaluate" in rooms["dipole.rl.episodes"]
    assert {"dipole.text.senteval", "dipole.text.senteval.tasks.Task"} <= set(rooms["dipole.text.senteval"])
    assert "dipole.core.train.adapter.Adapter" in rooms["dipole.core.train"]
    assert "dipole.objective" in rooms["dipole"]


def test_what_stands_elsewhere_is_sent_to_and_fields_are_a_table(hooks: Any) -> None:
    assert hooks.elsewhere(Derived) == f"As in the `Base` of {__name__.partition('.')[0]}: `said`."
    page = hooks.reference("dipole.core", ["dipole.rl.ContrastiveSAC", "dipole.core.train.config.TrainConfig"])
    inherited = next(line for line in page.splitlines() if "inherited_members: [" in line)
    assert "save_replay_buffer" in inherited
    assert "| `batch_size` | int, >= 2 | 256 | instances per step over all ranks |" in page


def test_names_of_classes_lead_to_them(hooks: Any) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/dipole.md"))
    found = hooks.on_page_content("<code>PairsError</code> <code>pairs</code>", page, None, None)
    place = "dipole.PairsError"
    assert found == f'<autoref identifier="{place}" optional><code>PairsError</code></autoref> <code>pairs</code>'
