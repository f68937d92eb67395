"""The theorems of the papers (theorems.toml), options of `dipole theory`, and facts of a run. Loads no torch."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dipole.core.objectives.spec import Range, checked, options_of
from dipole.core.utils.errors import OptionError

LOSSES = ("hinge", "logistic")
Count = Range(at_least=1)
Constant = Range(at_least=0)
Share = Range(at_least=0, at_most=1)
ARORA, LMCL, CLLR = "Arora et al. 2019", "LMCL", "CLLR"


@dataclass(frozen=True)
class Theorem:
    """One statement of a paper.

    Attributes:
        paper: "Arora et al. 2019", "LMCL" or "CLLR".
        name: as the paper calls it, such as "Lemma 4.3".
        key: its rows in `dipole theory RUN` and in its JSON.
        needs: what a run must have for it: "features", "labels", "metrics" (of training).
        always: whether the measured sides satisfy it on any features.
        statement: what is proved, in ASCII.
        functions: dotted names of the functions that compute it, below `dipole.core.evaluation`.
        assumption: conditions of the proof that are not measured.
        free: constants that the paper does not give, and that are options here.
        run: how to run it.
    """

    paper: str
    name: str
    key: str
    needs: Sequence[str]
    always: bool
    statement: str
    functions: Sequence[str]
    assumption: str = ""
    free: Sequence[str] = ()
    run: str = "dipole theory RUN"


_READ = tomllib.loads(Path(__file__).with_name("theorems.toml").read_text(encoding="utf-8"))
THEOREMS = tuple(Theorem(**each) for each in _READ["theorem"])


@dataclass(frozen=True)
class Choices:
    """Options of `dipole theory`. The options after `delta_neg` are constants that no paper gives.

    Args:
        losses: of Arora's theorems: "hinge", "logistic" or both.

    Raises:
        OptionError: one of them is out of its range.
    """

    losses: tuple[str, ...] = LOSSES
    k: Annotated[int, Range(at_least=1, at_most=1029), "negatives of Theorem 6.1"] = 4  # comb(1030, 515) is no float
    block: Annotated[int, Count, "members of a block of Proposition 6.2"] = 5
    draws: Annotated[int, Count, "sets of permutations that blocks are averaged over"] = 4
    tasks: Annotated[int, Range(at_least=2), "fitted tasks of the trained classifier"] = 50
    points: Annotated[int, Range(at_least=2), "largest number of points"] = 1000
    prior: Annotated[Literal["measured", "uniform"], "class prior rho"] = "measured"
    confidence: Annotated[float, Range(above=0, below=1), "1 - delta of the bounds that hold with a probability"] = 0.95
    seed: Annotated[int, Range(at_least=0), "seed of drawn points, tasks and blocks"] = 0
    epsilon: Annotated[float, Range(above=0), "eps of Lemma 5.1"] = 0.1
    mu: Annotated[float | None, Range(above=-math.inf), "slack of Theorem 3 (default: half the margin)"] = None
    delta_pos: Annotated[float | None, Share, "lower end of the margin (default: the run's, or 0.1)"] = None
    delta_neg: Annotated[float | None, Share, "upper end of the margin (default: the run's, or 0.5)"] = None
    constant: Annotated[float, Constant, "constant in the O of Gen_M"] = 1.0
    rademacher: Annotated[float, Constant, "complexity of the class (0 leaves it out)"] = 0.0
    tuples: Annotated[int | None, Count, "M of Gen_M (default: the number of points)"] = None
    gamma_constant: Annotated[float | None, Constant, "c' of Lemma 5.1 (default: the one derived in the docs)"] = None
    smoothness: Annotated[float, Constant, "S of CLLR Theorem 2"] = 1.0
    data_constant: Annotated[float, Constant, "C(X) of CLLR Theorem 3"] = 1.0

    def __post_init__(self) -> None:
        if not self.losses or not set(self.losses) <= set(LOSSES):
            raise OptionError(f"losses must be of {', '.join(LOSSES)}, got {self.losses}.", "losses")
        options = options_of(Choices)
        checked("theory", options, {option.name: getattr(self, option.name) for option in options})


@dataclass(frozen=True)
class RunFacts:
    """Settings and results of a run."""

    delta_pos: float = 0.1  # of its `dp` term, or that term's default
    delta_neg: float = 0.5  # likewise
    reduction: str = "mean"  # likewise
    dp_weight: float | None = None  # lambda of `dp`, if there is one
    cllr_weight: float | None = None  # lambda of `cllr`, if there is one
    alpha: float | None = None  # of `cllr`, if there is one
    negatives: float | None = None  # n, negatives per anchor of the first batch
    nce: float | None = None  # the last logged loss of its `infonce` term, in nats
