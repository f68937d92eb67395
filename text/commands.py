"""`dipole data wiki3029`: its arguments. Heavy imports come when it runs."""

import argparse

from dipole.core.cli.output import print_result
from dipole.core.cli.parser import Runner, positive, to_path
from dipole.core.utils.text import counted


def wiki3029(parser: argparse.ArgumentParser) -> Runner:
    """Articles as classes, as Arora et al. describe them (Sec. 8)."""
    source = (
        "a MediaWiki dump (.xml, .xml.bz2, .xml.gz), a file of articles (.jsonl, .jsonl.gz, .parquet), or a folder of "
        "such files or of articles as text"
    )
    parser.add_argument("source", type=to_path, metavar="SOURCE", help=source)
    parser.add_argument("out", type=to_path, metavar="OUT", help="the file to write: NAME.jsonl or NAME.jsonl.gz")
    parser.add_argument("--articles", type=positive, default=3029, metavar="N", help="articles (default: 3029)")
    parser.add_argument("--sentences", type=positive, default=200, metavar="M", help="of each article (default: 200)")
    parser.add_argument("--words", type=positive, default=4, metavar="W", help="of a sentence, at least (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="which articles and sentences are taken (default: 0)")
    cut = "a line of a text file is a sentence (by default the text is cut into sentences)"
    parser.add_argument("--lines", dest="unit", action="store_const", const="sentences", default="documents", help=cut)
    parser.add_argument("--encoding", default="utf-8", help="of text files (default: utf-8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _wiki3029


def _wiki3029(arguments: argparse.Namespace) -> int:
    from dipole.text.wiki3029 import build

    names = ("articles", "sentences", "words", "seed", "unit", "encoding")
    read, long_enough = build(arguments.source, arguments.out, **{name: getattr(arguments, name) for name in names})
    counts = {"taken": arguments.articles, "long_enough": long_enough, "read": read}
    articles, sentences = counted(arguments.articles, "article"), counted(arguments.sentences, "sentence")
    said = f"{arguments.out}: {articles} of {sentences}, drawn from {long_enough} that are long enough, of {read}"
    return print_result(arguments.json, {"file": str(arguments.out), "articles": counts}, said)
