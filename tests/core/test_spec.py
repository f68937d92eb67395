"""The grammar: what it reads, what it writes back, and where its carets point."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import dipole
from dipole import Composite, Objective
from dipole.core.objectives.spec import Term, format_terms, parse
from dipole.core.utils.errors import OptionError, SpecError

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
            assert key == key_read
            assert value == value_read
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
    assert str(built) == text
    assert str(dipole.objective(str(built))) == text


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


def test_constructors_check_like_the_grammar():
    from dipole.core.objectives.losses.infonce import InfoNCE

    with pytest.raises(OptionError, match="temperature must be a number > 0 or learned, got -1"):
        InfoNCE(temperature=-1)
    with pytest.raises(OptionError, match="no option 'temprature'"):
        InfoNCE(temprature=1)
    with pytest.raises(OptionError, match="infonce has no option 'self'"):
        InfoNCE(**{"self": 1})
    assert InfoNCE(1).temperature == 1.0
    assert InfoNCE(np.float32(0.25)).temperature == 0.25
    with pytest.raises(OptionError, match="temperature must be a number > 0 or learned, got True"):
        InfoNCE(True)
    with pytest.raises(OptionError, match="temperature must be a number > 0 or learned, got 1000"):
        InfoNCE(10**400)


def test_what_no_text_can_say_is_checked_as_well():
    from dipole.core.objectives.losses.infonce import InfoNCE

    with pytest.raises(OptionError, match=r"similarity must be one of 'cosine', .*, None, got 'foo'"):
        Objective("foo")
    with pytest.raises(OptionError, match="needs one term at least"):
        Composite([])
    with pytest.raises(OptionError, match="a weight for each of 1 terms, got 2"):
        Composite([InfoNCE()], [1.0, 2.0])
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(OptionError, match=f"dim must be a whole number >= 1, got {wrong}"):
            dipole.objective("infonce", dim=wrong)
