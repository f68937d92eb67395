"""SentEval's tasks, one file each (or a few that are read alike): the folder is listed, nothing else names them.

A file offers `NAMES` and `read(name, files) -> Task`. The `Task` says how it is scored.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dipole.core.utils.errors import DataError, RegistryError, nearest
from dipole.core.utils.plugins import import_all
from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Sentence, Split, Task

Reader = Callable[[str, TaskFiles], Task]


def _readers() -> dict[str, Reader]:
    found: dict[str, Reader] = {}
    for module in import_all(__name__).values():
        for name in module.NAMES:
            if name in found:
                raise RegistryError(f"the SentEval task {name!r} is read by two files of {Path(__file__).parent}")
            found[name] = module.read
    return found


READERS = _readers()


def load_task(name: str, task_path: str | Path, check: bool = True) -> Task:
    """A task read from SentEval's data folder.

    Args:
        name: as in SentEval: CR, MR, MPQA, SUBJ, TREC, MRPC, SST2, SST5, SICKRelatedness, SICKEntailment, STSBenchmark,
            STS12 to STS16, and the ten probing tasks. SICKRelatedness-cosine and STSBenchmark-cosine learn nothing.
        task_path: the data folder, which holds `downstream/` and `probing/`.
        check: compare counts with the published ones and look for known damage.

    Raises:
        DataError: unknown name, or a file is missing, empty, or is not the file that results are compared on.
    """
    if not isinstance(name, str) or name not in READERS:
        raise DataError(f"unknown task {name!r}; known: {', '.join(READERS)}.{nearest(str(name), READERS)}")
    files = TaskFiles(name, Path(task_path), check)
    task = READERS[name](name, files)
    empty = [split for split, found in task.splits.items() if not len(found)]
    if empty:
        raise DataError(f"{name}: no sample in {', '.join(empty)} below {files.root}; fetch the files again")
    return replace(task, changed=tuple(files.changed))


__all__ = ["READERS", "Sentence", "Split", "Task", "load_task"]
