"""Sentence-encoder probes with SentEval's interface, files and result keys, under four named protocols.

    from dipole.text import senteval
    se = senteval.SE({"task_path": "data", "kfold": 10}, batcher, prepare)
    results = se.eval(["MR", "CR", "SUBJ", "MPQA", "TREC", "MRPC"])

A script written for SentEval runs by importing this module instead. `usepytorch` given there selects "senteval-torch"
or "senteval-sklearn". Without it, `protocol` decides. The default is "fast".
"""

from dipole.text.senteval import engine
from dipole.text.senteval.engine import SE, Params, evaluate, for_genuine
from dipole.text.senteval.protocols import PROTOCOLS
from dipole.text.senteval.scoring import Result, describe
from dipole.text.senteval.tasks import SIX_TASKS, load_task

__all__ = [
    "PROTOCOLS",
    "SE",
    "SIX_TASKS",
    "Params",
    "Result",
    "describe",
    "engine",
    "evaluate",
    "for_genuine",
    "load_task",
]
