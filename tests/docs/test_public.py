"""Every public name says what it is. Each rule of what a docstring must say is broken on purpose."""

import doctest
import functools
from collections.abc import Callable
from dataclasses import make_dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import docstrings
import PIL.Image
import public
import pytest
import torch
from pydantic import Field, create_model
from torch import Tensor

import dipole
from dipole import evaluation, vision
from dipole.core.utils.errors import OptionError


@pytest.fixture
def domains():
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sentence_transformers")


@pytest.mark.usefixtures("domains")
def test_every_public_docstring_says_what_it_must():
    assert docstrings.problems() == []
    names = {each.name for each in public.entries()}
    assert {"infonce", "dipole.text.senteval.SE.eval", "dipole.Composite.forward"} <= names
    assert "dipole.core.train.run.Run.advance" in names
    assert "dipole.rl.ContrastiveSAC.predict" not in names  # of stable-baselines3


@pytest.mark.usefixtures("domains")
def test_what_packages_export_pages_import_and_functions_return_is_public():
    names = public.public_names()
    assert names["dipole.objective"][0] == "dipole.core.objectives.objective.objective"
    assert names.keys() >= {
        "dipole.text.ContrastiveLoss", "dipole.rl.ContrastiveSAC", "dipole.Pairs", "dipole.parametrize_with_checks",
        "dipole.Adapter", "dipole.Context", "dipole.Domain", "dipole.Settings", "dipole.Tempered", "dipole.add_domain",
        "dipole.reference.total", "dipole.DipoleError", "dipole.rl.pixel_agent.PixelAgent",
        "dipole.core.objectives.term_values.TermValue",  # `Outcome`, which objectives return, has some
        "dipole.core.utils.seeding.Seeds",  # a key of `Context`
    }  # fmt: skip
    assert "dipole.core.utils.errors.nearest" not in names  # not in the module's __all__
    assert "dipole.__version__" not in names
    assert len({place for place, _ in names.values()}) == len(names)


def entry(value: Any) -> public.Entry:
    (found,) = public.entries_of("thing", value)
    return found


def method(owner: type, name: str) -> public.Entry:
    return next(each for each in public.members(entry(owner)) if each.name == f"thing.{name}")


NOTHING, NUMBER = "def function() -> None: ...", "def function() -> int: ..."
TENSOR = "def function(x: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor: ..."
ARGUMENTS = "A sum, ().\n\nArgs:\n    x: {}\n    use: a function.\n"
RESULT = "A sum.\n\nArgs:\n    x: (n,).\n    use: a function.\n\nReturns:\n    {}\n"
CROWDED = "Raises has ValueError in the line of another error"
SHAPES = ["(A, d) rows.", "numbers, () each.", "(n >= 2, d).", "(...), of any shape.", "(B, ...) of an encoder."]
# A rule, the signature and the docstring of a function, and the complaint: None for no complaint.
CASES = [
    (docstrings.no_sentence, NOTHING, "One sentence.", None),
    (docstrings.no_sentence, NOTHING, "One that goes on\nin a second line.", None),
    *((docstrings.no_sentence, NOTHING, text, "") for text in ("", "TODO", "x")),
    *((docstrings.shapeless_arguments, TENSOR, ARGUMENTS.format(line), None) for line in (*SHAPES, "as in `other`.")),
    *((docstrings.shapeless_results, TENSOR, RESULT.format(line), None) for line in SHAPES),
    *(
        (rule, TENSOR, text.format(line), told)
        for rule, text, told in (
            (docstrings.shapeless_arguments, ARGUMENTS, "Args has no shape of x"),
            (docstrings.shapeless_results, RESULT, ""),
        )
        for line in ("rows (of a batch).", "rows of `f(x)`.", "rows.")
    ),
    (docstrings.unsaid_results, NUMBER, "Read a file.", "it says nothing of what it returns, int"),
    (docstrings.unsaid_results, NUMBER, "The number in a file.", None),
    (docstrings.unsaid_results, NUMBER, "Read a file.\n\nReturns:\n    Its number.\n", None),
    *(
        (docstrings.crowded_raises, NOTHING, f"A function.\n\nRaises:\n    {line}\n", told)
        for line, told in (
            ("TypeError: here.", None),
            ("TypeError: here; a ValueError is another thing.", None),
            ("TypeError: here. ValueError: there.", CROWDED),
            ("TypeError: here; ValueError if there.", CROWDED),
            ("TypeError, ValueError: here.", CROWDED),
        )
    ),
    *(
        (docstrings.sourceless, NOTHING, f"A function.\n\nFormula{head}:\n    L = 0\n", None)
        for head in (" (Arora et al. 2019, Sec. 8.1)", " (LMCL Eqs. 7-10), D = 1")
    ),
    (
        docstrings.sourceless, NOTHING, "A function.\n\nFormula:\n    L = 0\n",
        "it says no paper and equation at 'Formula:'",
    ),
]  # fmt: skip


def documented(signature: str, text: str) -> public.Entry:
    namespace = {"Tensor": Tensor, "Callable": Callable}
    exec(signature, namespace)
    namespace["function"].__doc__ = text
    return entry(namespace["function"])


@pytest.mark.parametrize(("rule", "signature", "text", "told"), CASES)
def test_rules_complain_about_what_they_are_for(rule, signature, text, told):
    found = rule(documented(signature, text))
    assert found is None if told is None else told in found


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


@pytest.mark.usefixtures("domains")
def test_missing_docstrings_and_errors_are_named():
    assert list(docstrings.broken(method(Derived, "said"))) == []
    assert docstrings.documented_at(method(Derived, "said")) is Base
    for name in ("unsaid", "kept"):
        assert "no docstring of its own" in next(docstrings.broken(method(Derived, name)))
    assert not any("_private" in each.name for each in public.members(entry(Derived)))
    assert docstrings.unraised(method(Raising, "method")) is None
    assert docstrings.unraised(method(Raising, "other")) == "Raises has no line for ValueError"
    lines = "".join(f"    {name}: here.\n" for name in ("OptionError", "KeyError", "a.OddError", "OddError"))
    found = docstrings.unknown_errors(documented(NOTHING, f"A function.\n\nRaises:\n{lines}"))
    assert found == "Raises names OddError, which no page has"


def test_an_argument_needs_a_line_of_its_own():
    known = "A thing.\n\nArgs:\n    {}: known.\n"

    class Width:
        __doc__ = known.format("width")

    class Thing(Width):
        __doc__ = known.format("height")

        def __init__(self, width: int, height: int, depth: int, *rest: int, _hidden: int = 0) -> None: ...

    class Row(NamedTuple):
        """A row."""

        one: int

    data = make_dataclass("Data", ["one", "two"], namespace={"__doc__": known.format("one")})
    table = create_model("Table", __doc__="A table.", one=(int, Field(0, description="known")), two=(int, 0))
    for owner, names in ((Thing, "width, depth"), (data, "two"), (Row, "one"), (table, "two")):
        assert docstrings.unexplained(entry(owner)) == f"Args has no line for {names}", owner


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


def test_all_that_a_module_defines_is_public_where_it_names_nothing():
    module = ModuleType("some.module")
    for name, place in (("own", "some.module"), ("_own", "some.module"), ("other", "elsewhere")):
        setattr(module, name, type(name, (), {"__module__": place}))
    assert public.exports(module) == ["own"]
    module.__all__ = ["other"]  # type: ignore[attr-defined]
    assert public.exports(module) == ["other"]


@pytest.fixture
def hooks(domains):
    return pytest.importorskip("hooks", exc_type=ImportError)


def test_public_names_have_pages_that_link_to_them(hooks):
    rooms = hooks.rooms()
    assert "dipole.rl.sampling.FrameBatch" in rooms["dipole.rl"]
    assert "dipole.rl.episodes.score_at" in rooms["dipole.rl.episodes"]
    assert hooks.own_pages("dipole.rl.episodes") == ["dipole.rl.episodes.evaluate", "dipole.rl.episodes.plot_curves"]
    assert "dipole.objective" in rooms["dipole"]  # `dipole.Objective` has the page of this name
    assert {"dipole.text.senteval", "dipole.text.senteval.tasks.Split"} <= set(rooms["dipole.text.senteval"])
    assert rooms["dipole.Adapter"] == ["dipole.Adapter"]
    page = hooks.reference("dipole", rooms["dipole"])
    assert "- [`Objective`](dipole.Objective.md): One term of a loss: a small function of positives and row" in page
    assert hooks.elsewhere(Derived) == f"As in the `Base` of {__name__.partition('.')[0]}: `said`."
    page = hooks.reference("dipole.core", ["dipole.rl.ContrastiveSAC", "dipole.core.train.config.TrainConfig"])
    inherited = next(line for line in page.splitlines() if "inherited_members: [" in line)
    assert "save_replay_buffer" in inherited
    assert "| `batch_size` | int, >= 2 | 256 | instances per step over all ranks |" in page
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/dipole.md"))
    found = hooks.on_page_content("<code>PairsError</code> <code>pairs</code>", page, None, None)
    place = "dipole.PairsError"
    assert found == f'<autoref identifier="{place}" optional><code>PairsError</code></autoref> <code>pairs</code>'


NEEDED = {"dipole.text": "sentence_transformers", "dipole.rl": "stable_baselines3"}
MODULES = [vision, evaluation, *(import_module(name) for name, needs in NEEDED.items() if find_spec(needs)), dipole]
WITHOUT = {"AnyStatistic", "TEMPERATURE", "__version__", *(name for name in dipole.__all__ if name.endswith("Error"))}
NAMES = [(module, name) for module in MODULES for name in module.__all__ if name not in WITHOUT]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_the_example_runs(module, name, tmp_path, tmp_path_factory, monkeypatch):
    value = getattr(module, name)
    folder = tmp_path_factory.getbasetemp() / "runs" if name in ("find_run", "load_run") else tmp_path  # one run
    known = {"torch": torch, "PIL": PIL, "dipole": dipole, "folder": str(folder)}
    known |= {each: getattr(module, each) for each in module.__all__}
    if module.__name__ == "dipole.text":
        from tests.text.tiny_sentences import tiny_model

        known["model"] = tiny_model(tmp_path)
    monkeypatch.setattr("dipole.core.train.domains._added", {})  # an example adds a domain
    if module.__name__ == "dipole.rl":  # an example registers an environment
        registry = import_module("dipole.rl.envs.registry")
        monkeypatch.setattr(registry, "_environments", dict(registry._environments))
    examples = doctest.DocTestParser().get_doctest(value.__doc__, known, name, None, 0)
    assert examples.examples, f"{name} has no example"
    said: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    with dipole.register.__self__.temporary():
        doctest.DocTestRunner(verbose=False, optionflags=flags).run(examples, out=said.append)
    assert not said, "".join(said)
