"""The grammar and the registry: what is read and written back, where carets point, and who registers what."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import dipole
from dipole import Composite, Objective
from dipole.core.objectives import losses, regularizers
from dipole.core.objectives.losses.infonce import InfoNCE
from dipole.core.objectives.registry import Registry, registry
from dipole.core.objectives.spec import Range, Term, format_terms, parse
from dipole.core.utils import plugins
from dipole.core.utils.errors import OptionError, RegistryError, SpecError

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
VALUES = st.one_of(
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(max_size=12),
)


@given(
    st.lists(
        st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3), st.none() | st.floats(0, 1e6)),
        min_size=1,
        max_size=4,
    )
)
@example([("a", {"b": "x²", "c": "naïve"}, None)])
def test_what_is_written_is_read_back(raw):
    terms = [Term(name, tuple(options.items()), weight) for name, options, weight in raw]
    again = parse(format_terms(terms))
    for term, read in zip(terms, again, strict=True):
        assert (read.name, read.weight) == (term.name, term.weight)
        for (key, value), (key_read, value_read) in zip(term.options, read.options, strict=True):
            assert (key, value) == (key_read, value_read)
            assert type(value) is type(value_read)


@pytest.mark.parametrize(
    "text",
    [
        "infonce",
        "infonce(temperature=0.5) + 0.1*dp(delta_pos=0.1, delta_neg=0.5) + 0.1*cllr(dim=256, norm=nuclear)",
        "0.5*infonce + 0.5*cacr(k=4, detach_weights=true)",
        "infonce(similarity=bilinear)",
    ],
)
def test_objective_prints_what_it_was_built_from(text):
    built = dipole.objective(text)
    assert (str(built), str(dipole.objective(str(built)))) == (text, text)


def test_spelling_weights_and_values():
    assert dipole.objective("infonce+dp+cllr").weights == [1.0, 0.1, 0.1]
    assert str(dipole.objective("infonce+dp")) == "infonce + 0.1*dp"
    assert str(dipole.objective(" nt-xent( temperature = 5e-1 ,similarity='cosine' )+.1*dp")) == (
        "infonce(temperature=0.5, similarity=cosine) + 0.1*dp"
    )
    with pytest.raises(SpecError):
        dipole.objective("infonce(temperature=2*3)")


@pytest.mark.parametrize(
    ("text", "word", "under"),
    [
        ("infonec", "Did you mean 'infonce'", "infonec"),
        ("infonce + 0.1*dpp", "Did you mean 'dp'", "dpp"),
        ("infonce(temprature=1)", "Did you mean 'temperature'", "temprature=1"),
        ("infonce(temperature=0)", "> 0", "temperature=0"),
        ("infonce(temperature=-1)", "> 0", "temperature=-1"),
        ("infonce(temperature=cold)", "a number > 0", "temperature=cold"),
        ("infonce(temperature=true)", "a number > 0", "temperature=true"),
        ("infonce(similarity=cosin)", "cosine, dot, bilinear", "similarity=cosin"),
        ("infonce(joint=1)", "true or false", "joint=1"),
        ("cacr(k=2.5)", "an integer >= 1", "k=2.5"),
        ("dcl(rho=1)", "< 1", "rho=1"),
        ("infonce + dp(delta_pos=0.6)", "delta_pos must be < delta_neg", "delta_pos=0.6"),
        ("infonce $ dp", "cannot read '$'", "$"),
        ("infonce - 0.1*dp", "Terms are added", "-"),
        ("infonce*0.5", "a weight comes before its term", "*"),
        ("infonce dp", "expected '+' or the end", "dp"),
        ("infonce(temperature=)", "expected a value", ")"),
        ("infonce(temperature 1)", "expected '='", "1"),
        ("infonce(temperature=1, temperature=2)", "given twice", "temperature"),
        ("0.1 dp", "expected '*'", "dp"),
        ("infonce(temperature=1e999)", "too large", "1e999"),
        ("infonce + alignment", "diagnostic", "alignment"),
        ("infonce + dp(self=none)", "dp has no option 'self'. Its options: delta_pos", "self=none"),
        ("-1*infonce", "weight of infonce must be >= 0", "-1*"),
    ],
)
def test_errors_point_at_the_culprit(text, word, under):
    with pytest.raises(SpecError) as caught:
        dipole.objective(text)
    message = str(caught.value)
    assert word in message
    line, carets = message.split("\n")[-2:]
    start = carets.index("^")
    assert line[start:].startswith(under)
    assert carets.count("^") >= len(under.split("=")[0]) or under in (")", "1")


@pytest.mark.parametrize("text", ["", "   ", "infonce(", "infonce)", "+", "infonce +", "*", "__import__('os')", "a.b"])
def test_nonsense_is_one_clear_error(text):
    with pytest.raises(SpecError):
        dipole.objective(text)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: InfoNCE(temperature=-1), "temperature must be a number > 0 or learned, got -1"),
        (lambda: InfoNCE(True), "temperature must be a number > 0 or learned, got True"),
        (lambda: InfoNCE(10**400), "temperature must be a number > 0 or learned, got 1000"),
        (lambda: InfoNCE(temprature=1), "no option 'temprature'"),
        (lambda: InfoNCE(**{"self": 1}), "infonce has no option 'self'"),
        (lambda: Objective("foo"), r"similarity must be one of 'cosine', .*, None, got 'foo'"),
        (lambda: Composite([]), "needs one term at least"),
        (lambda: Composite([InfoNCE()], [1.0, 2.0]), "a weight for each of 1 terms, got 2"),
        *(
            (lambda dim=dim: dipole.objective("infonce", dim=dim), f"dim must be a whole number >= 1, got {dim}")
            for dim in (0, -1, 2.5, True)
        ),
    ],
)
def test_constructors_check_like_the_grammar(make, said):
    with pytest.raises(OptionError, match=said):
        make()


def test_numbers_of_any_kind_are_taken():
    assert [InfoNCE(1).temperature, InfoNCE(np.float32(0.25)).temperature] == [1.0, 0.25]


BASES = {
    "infonce", "quickthoughts", "dcl", "hcl", "align_uniform", "cacr", "tuple", "triplet", "co2", "swav", "blocks",
    "cross_entropy", "regression", "vicreg", "barlow_twins",
}  # fmt: skip


def test_everything_is_registered_and_names_are_taken_once():
    assert {entry.name for entry in registry.entries("objective")} >= BASES
    assert {entry.name for entry in registry.entries("regularizer")} >= {"dp", "cllr"}
    assert len(registry.entries("diagnostic")) >= 8
    with registry.temporary(), pytest.raises(RegistryError, match="already registered by dipole"):

        @registry.register("infonce", source="none", formula="0")
        class Other(Objective):
            """Another."""


@pytest.mark.parametrize("entry", registry.entries(), ids=lambda entry: entry.name)
def test_every_entry_says_what_it_is(entry):
    assert entry.summary.endswith(".")
    assert entry.formula
    assert entry.source
    for option in entry.options:
        assert option.help, f"{entry.name}.{option.name} has no help"
        assert option.allowed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "loss"}, "kind must be one of 'objective', 'regularizer', 'diagnostic', got 'loss'"),
        ({"weight": -1.0}, r"weight must be a finite number >= 0, got -1\.0"),
        ({"weight": float("nan")}, "weight must be a finite number >= 0, got nan"),
    ],
)
def test_what_nobody_could_use_is_not_registered(settings, said):
    with registry.temporary(), pytest.raises(RegistryError, match=f"cannot register 'other' .*{said}"):

        @registry.register("other", **settings)
        class Other(Objective):
            """Another."""


def test_one_file_and_one_decorator_are_enough():
    with registry.temporary():

        @registry.register("margin_mean", aliases=("mm",), formula="-s", source="here")
        class MarginMean(Objective):
            """Mean similarity of positives below a margin."""

            needs_negatives = False

            def __init__(self, margin: Annotated[float, Range(at_least=0), "margin"] = 0.5) -> None:
                super().__init__("cosine")
                self.margin = margin

            def loss(self, positive, rows):
                return rows.over_positives((self.margin - positive).clamp_min(0))

        built = dipole.objective("mm(margin=1) + 0.1*dp")
        assert str(built) == "margin_mean(margin=1.0) + 0.1*dp"
        with pytest.raises(SpecError, match=r"margin must be a number >= 0"):
            dipole.objective("margin_mean(margin=-1)")
    with pytest.raises(SpecError, match="unknown name"):
        dipole.objective("margin_mean")


@pytest.mark.parametrize(("package", "kind"), [(losses, "objective"), (regularizers, "regularizer")])
def test_every_file_of_the_folder_is_found(package, kind):
    files = {path.stem for path in Path(package.__file__).parent.glob("*.py")} - {"__init__"}
    homes = {
        entry.target.__module__ for entry in registry.entries(kind) if entry.target.__module__.startswith("dipole.")
    }
    assert homes == {f"{package.__name__}.{name}" for name in files}


REGISTER = """
from functools import partial
from dipole.core.objectives import registry as home
register = partial(getattr(home, "current", home.registry).register, formula="0", source="none")
"""


def write_modules(folder: Path, **texts: str) -> None:
    """Write modules that may register something."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(REGISTER + text if "@register" in text else text)


def test_a_file_dropped_into_a_folder_is_imported(tmp_path, monkeypatch):
    folder = tmp_path / "dropped_in"
    folder.mkdir()
    (folder / "__init__.py").write_text("from dipole.core.utils.plugins import import_all\nimport_all(__name__)\n")
    write_modules(folder, mine="@register('dropped_in')\ndef mine(): 'Mine.'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with registry.temporary():
        __import__("dropped_in")
        assert registry.get("dropped_in").summary == "Mine."


BROKEN_ONCE = """
import sys
from importlib.abc import MetaPathFinder

class Fails(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "dipole.core.objectives.losses.hcl":
            raise RuntimeError("no memory")

sys.meta_path.insert(0, fails := Fails())
from dipole.core.objectives.registry import registry
for call in (registry.entries, lambda: registry.get("infonce"), lambda: registry.broken):
    try:
        call()
    except RuntimeError as error:
        assert str(error) == "no memory"
    else:
        raise SystemExit("a partial registry was handed out")
sys.meta_path.remove(fails)
print(*sorted(entry.name for entry in registry.entries()))
"""


def test_an_import_that_fails_once_is_said_and_tried_again():
    done = subprocess.run([sys.executable, "-c", BROKEN_ONCE], check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == {entry.name for entry in registry.entries()}


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A registry that finds the modules of a folder, as plug-ins of these names."""

    def declare(**modules: str) -> Registry:
        monkeypatch.syspath_prepend(tmp_path)
        found = [EntryPoint(name, module, "dipole.objectives") for name, module in modules.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)
        made = Registry()
        monkeypatch.setattr("dipole.core.objectives.registry.current", made, raising=False)
        return made

    return declare


def test_a_broken_plug_in_leaves_nothing_behind_and_takes_nothing_with_it(tmp_path, fresh):
    """One package imports another's module and then fails: the other's entries are there all the same."""
    write_modules(
        tmp_path,
        whole_plugin="@register('whole')\ndef whole():\n    'Whole.'\n",
        broken_plugin="import whole_plugin\n@register('half')\ndef half():\n    'Half.'\n1 / 0\n",
    )
    found = fresh(broken="broken_plugin", whole="whole_plugin")
    assert [entry.name for entry in found.entries()] == ["whole"]
    assert list(found.broken) == ["broken"]
    for name, said in (
        ("broken", "ZeroDivisionError: division by zero"),
        ("half", r"unknown name 'half'(.|\n)*A plug-in that cannot be used: 'broken'"),
    ):
        with pytest.raises(SpecError, match=said):
            found.get(name)


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise BaseException('away')", "raise GeneratorExit()"])
def test_whatever_ends_an_import_ends_nothing_else(end, tmp_path, fresh):
    """What its first module registered is undone, and that module can be imported, and so register, once more."""
    package = tmp_path / "half_package"
    package.mkdir()
    write_modules(
        package, __init__="", first="@register('first')\ndef first():\n    'First.'\n",
        whole=f"import sys\nfrom half_package import first\n{end}\n", again="from half_package import first\n",
    )  # fmt: skip
    found = fresh(whole="half_package.whole")
    assert found.entries() == []
    with pytest.raises(SpecError, match=r"unknown name 'first'\.\nA plug-in that cannot be used: 'whole'"):
        found.get("first")
    __import__("half_package.again")
    assert [entry.name for entry in found.entries()] == ["first"]
    for name in [name for name in sys.modules if name.startswith("half_package")]:
        del sys.modules[name]


def test_what_any_plug_in_registers_is_undone_where_it_fails(tmp_path, monkeypatch):
    """A domain's module that registers an objective and then fails. An interruption is no broken plug-in."""
    write_modules(
        tmp_path,
        failing_domain="@register('of_a_domain')\ndef half():\n    'Half.'\n",
        interrupted_plugin="raise KeyboardInterrupt\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry.entries()
    with pytest.raises(plugins.PluginError, match="ABSENT"):
        plugins.load(EntryPoint("theirs", "failing_domain:ABSENT", "dipole.domains"))
    assert "of_a_domain" not in [entry.name for entry in registry.entries()]
    assert "failing_domain" not in sys.modules
    with pytest.raises(KeyboardInterrupt):
        plugins.load(EntryPoint("interrupted", "interrupted_plugin", "dipole.objectives"))
