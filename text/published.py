"""Data sets of text that recipes need, and where they are distributed. Imports nothing heavy."""

from dipole.core.train.data_sets import Built, DataSet
from dipole.core.utils.download import RemoteFile

SETS: dict[str, DataSet | Built] = {
    "bookcorpus": DataSet(
        "74 million sentences of unpublished novels, without their boundaries (Zhu et al. 2015)",
        "unknown, as the Hub says; the novels are their authors'",
        "https://huggingface.co/datasets/bookcorpus/bookcorpus",
        "dipole.text.prepare:bookcorpus_files",
        "dipole.text.prepare:bookcorpus",
        "text.corpus={folder}",
    ),
    "senteval": DataSet(
        "SentEval's transfer and STS tasks, tokenized as its scripts do (Conneau & Kiela 2018)",
        "each task has its own, most for research alone. See the pages of their authors",
        "https://github.com/facebookresearch/SentEval",
        # Nobody has published a checksum of this archive.
        (RemoteFile("https://huggingface.co/datasets/princeton-nlp/datasets-for-simcse/resolve/main/senteval.tar"),),
        "dipole.text.prepare:senteval",
        "text.senteval={folder}",
    ),
    "wiki3029": Built(
        "articles as classes, from a dump or any texts (Arora et al., Sec. 8)", "dipole.text.commands:wiki3029"
    ),
}
