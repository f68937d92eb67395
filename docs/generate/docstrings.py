"""Check public docstrings. Each rule reports its violations, and `make docs` fails if there are any."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from functools import cache
from textwrap import dedent
from typing import Any, is_typeddict

import public
from public import Entry, hint
from pydantic import BaseModel

ITEM = r"[\w.+*/<>= -]+"
SHAPE = re.compile(rf"(?<![\w`])\((?:|\.\.\.|{ITEM},(?:{ITEM},)*(?:{ITEM})?)\)")
"""(), (A,), (A, K), (n >= 2, d), (B, ...)."""
REFERENCE = re.compile(r"(as (in|of|there)|likewise)\b")
"""Starts of argument lines that refer to another place."""
ARRAY = re.compile(r"\b(Tensor|NDArray|ndarray|Array)\b")
DOES = re.compile(
    r"(Add|Apply|Begin|Build|Call(ed)?|Choose|Combine|Compare|Compute|Continue|Create|Cut|Decorate|Draw|Drop|Embed"
    r"|Encode|Evaluate|Fill|Find|Give|Go|Join|Judge|Keep|Load|Look|Make|Measure|Open|Pair|Play|Put|Raise|Read|Rebuild"
    r"|Register|Run|Say|Score|Set|Start|Store|Take|Train|Turn|Unpack|Update|Work|Write|Yield)\b"
)
"""Starts of sentences that describe an action and no result."""
SILENT = ("None", "NoReturn", "Never", "inspect._empty")


def problems() -> list[str]:
    """Return one line for each violation in a public docstring."""
    return [f"{entry.name}: {said}" for entry in public.entries() for said in broken(entry)]


def broken(entry: Entry) -> Iterator[str]:
    """Return the violations of one docstring. An override may rely on the docstring of its base class."""
    if entry.doc or documented_at(entry) is None:
        yield from (said for said in (rule(entry) for rule in RULES) if said)


def documented_at(entry: Entry) -> type | None:
    """Return the base class that documents a method without a docstring, or None."""
    name = entry.name.rpartition(".")[2]
    bases = entry.owner.__mro__[1:-1] if entry.owner is not None else ()
    return next((base for base in bases if getattr(vars(base).get(name), "__doc__", None)), None)


# Parts of a docstring -------------------------------------------------------------------------------------------------


def section(doc: str, title: str) -> str | None:
    """Return the text under "Title:", or None without such a section."""
    found = re.search(rf"^{title}:[ \t]*\n((?:[ \t]+.*\n?|\n(?=[ \t]))+)", doc + "\n", re.MULTILINE)
    return dedent(found.group(1)).strip("\n") if found else None


def explained(doc: str) -> dict[str, str]:
    """Return the entries of Args and Attributes."""
    text = "\n".join(filter(None, (section(doc, "Args"), section(doc, "Attributes"))))
    return dict(re.findall(r"^(\w+): (.*(?:\n[ \t]+.*)*)", text, re.MULTILINE))


def raises(doc: str) -> list[str]:
    """Return the entries of Raises."""
    return re.findall(r"^\S.*(?:\n[ \t]+.*)*", section(doc, "Raises") or "", re.MULTILINE)


def arguments(entry: Entry) -> dict[str, str]:
    """Return names and annotations of the arguments, or of the fields of a dataclass."""
    if inspect.isclass(entry.value) and (issubclass(entry.value, BaseModel | tuple) or is_typeddict(entry.value)):
        owners = [each for each in public.bases(entry.value) if "__annotations__" in vars(each)]
        return {name: hint(each.__annotations__[name]) for each in owners for name in public.fields(each)}
    is_data = inspect.isclass(entry.value) and hasattr(entry.value, "__dataclass_fields__")
    if isinstance(entry.value, public.PROPERTIES) or (entry.function is None and not is_data):
        return {}
    given = inspect.signature(entry.value if is_data else entry.function).parameters.values()
    more = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {each.name: hint(each.annotation) for each in given if each.kind not in more}
    return {name: kind for name, kind in named.items() if name not in ("self", "cls") and name[0] != "_"}


def result(entry: Entry) -> str:
    """Return the annotation of the result, or "" without one."""
    if entry.function is None or inspect.isclass(entry.value):
        return ""
    annotation = hint(inspect.signature(entry.function).return_annotation)
    return "" if annotation in SILENT else annotation


# Rules ---------------------------------------------------------------------------------------------------------------


def no_sentence(entry: Entry) -> str | None:
    """Require a first sentence. The page omits names without one."""
    first = entry.doc.partition("\n\n")[0].strip()
    is_sentence = re.search(r"\w{2,}.*[.:]$", first, re.DOTALL)
    return None if is_sentence else "it has no docstring of its own that begins with a sentence"


def unexplained(entry: Entry) -> str | None:
    """Require a line in Args for each argument, or a help text with its annotation."""
    told = explained(entry.doc).keys()
    if inspect.isclass(entry.value) and issubclass(entry.value, BaseModel):
        told |= {name for name, field in entry.value.model_fields.items() if field.description}
    missing = [name for name, kind in arguments(entry).items() if name not in told and "Annotated[" not in kind]
    return f"Args has no line for {', '.join(missing)}" if missing else None


def shapeless_arguments(entry: Entry) -> str | None:
    """Require a shape in the line of each tensor or array."""
    told = explained(entry.doc)
    arrays = [name for name, kind in arguments(entry).items() if ARRAY.search(kind.partition("Callable")[0])]
    lines = {name: told[name] for name in arrays if name in told}
    missing = [name for name, said in lines.items() if not SHAPE.search(said) and not REFERENCE.match(said)]
    return f"Args has no shape of {', '.join(missing)}" if missing else None


def shapeless_results(entry: Entry) -> str | None:
    """Require the shape of a returned tensor or array in Returns or in the first paragraph."""
    said = section(entry.doc, "Returns") or section(entry.doc, "Yields") or entry.doc.partition("\n\n")[0]
    missing = ARRAY.search(result(entry)) and not SHAPE.search(said)
    return f"it says no shape of what it returns, {result(entry)}" if missing else None


def unsaid_results(entry: Entry) -> str | None:
    """Require the result in Returns, in Yields or in the first sentence."""
    silent = not section(entry.doc, "Returns") and not section(entry.doc, "Yields") and DOES.match(entry.doc)
    return f"it says nothing of what it returns, {result(entry)}" if result(entry) and silent else None


def unraised(entry: Entry) -> str | None:
    """Require every raised error in Raises, of the function or of its class."""
    owner = "" if entry.owner is None else Entry("", entry.owner, vars(entry.owner).get("__init__")).doc
    said = " ".join(raises(entry.doc) + raises(owner))
    missing = [each for each in _raised(entry.function) if not re.search(rf"\b{each}\b", said)]
    return f"Raises has no line for {', '.join(missing)}" if missing else None


def crowded_raises(entry: Entry) -> str | None:
    """Require one error per line of Raises."""
    beside = r"(?:[.;] |^[^:]*, |^[^:]* or )(\w+Error)\b(?=[:, ])"
    found = [name for each in raises(entry.doc) for name in re.findall(beside, each)]
    return f"Raises has {', '.join(found)} in the line of another error" if found else None


def unknown_errors(entry: Entry) -> str | None:
    """Require that errors in Raises are public, builtin, or named with their package."""
    named = [re.split(r"[^\w.]", each, maxsplit=1)[0] for each in raises(entry.doc)]
    missing = [each for each in named if "." not in each and each not in _errors() and not hasattr(builtins, each)]
    return f"Raises names {', '.join(missing)}, which no page has" if missing else None


def sourceless(entry: Entry) -> str | None:
    """Require a year, equation, section, appendix or algorithm with each "Formula"."""
    heads = [line for line in entry.doc.splitlines() if line.startswith("Formula")]
    bare = [line for line in heads if not re.search(r"\b\d{4}\b|\b(Eqs?|Secs?|App|Thms?|Alg)\b", line)]
    return f"it says no paper and equation at {bare[0]!r}" if bare else None


RULES = (
    no_sentence, unexplained, shapeless_arguments, shapeless_results, unsaid_results, unraised, crowded_raises,
    unknown_errors, sourceless,
)  # fmt: skip


def _raised(function: Any) -> list[str]:
    """Return names of the errors that a function raises, or that its returned inner function raises."""
    try:
        tree = ast.parse(dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return []
    given = (node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    returned = {value.id for value in given if isinstance(value, ast.Name)}
    waiting, found = list(ast.iter_child_nodes(tree)), []
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.Lambda) and getattr(node, "name", "") not in returned:
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            found.append(getattr(error, "id", getattr(error, "attr", "")))
    # A small letter is that of an error which came from elsewhere, and what a subclass has to define is none.
    return list(dict.fromkeys(name for name in found if name[:1].isupper() and name != "NotImplementedError"))


@cache
def _errors() -> frozenset[str]:
    values = [value for _, value in public.public_names().values() if inspect.isclass(value)]
    return frozenset(value.__name__ for value in values if issubclass(value, Exception))
