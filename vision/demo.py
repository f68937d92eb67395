"""The demo: digits under four objectives, a table of probes and a picture of the distances."""

import sys
from collections.abc import Sequence
from pathlib import Path

from dipole.core.record import RunRecord
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train
from dipole.core.utils.extras import check_drawing, new_figure
from dipole.core.utils.text import counted, text_table

OBJECTIVES = ("infonce", "infonce + 5*dp", "cacr", "infonce + 0.1*cllr")
COLUMNS = {"all labels": "linear/accuracy", "5 labels per class": "few_shot/accuracy", "k-means": "kmeans/accuracy"}
BASELINES = {"untrained encoder": "untrained", "raw pixels": "raw"}
SAME, DIFFERENT = "#1b6ca8", "#d1603d"


def demo(runs: Path, picture: Path) -> None:
    """Train the digits once per objective, print accuracies with the baselines and draw the distance histograms."""
    check_drawing()
    records = []
    for number, objective in enumerate(OBJECTIVES, 1):
        config = load_recipe("digits-simclr", [f"objective={objective}"]).config
        print(f"[{number}/{len(OBJECTIVES)}] {config.objective}", file=sys.stderr, flush=True)
        records.append(train(config, runs))
    print(table(records))
    draw_histograms(records, picture)


def table(records: Sequence[RunRecord]) -> str:
    """Return the test accuracy of every record by probe, with the baselines of the first record below."""
    first = records[0]
    rows = [("objective", *COLUMNS)]
    for label, record, prefix in [
        *((record.objective, record, "") for record in records),
        *((label, first, f"{name}/") for label, name in BASELINES.items()),
    ]:
        values = [record.results[f"{prefix}{name}"] for name in COLUMNS.values()]
        rows.append((label, *("-" if value is None else f"{100 * value:.1f} %" for value in values)))
    title = f"{first.name}: test accuracy of frozen features, seed {first.seed}, {counted(first.epochs, 'epoch')}"
    return f"{title}\n\n{text_table(rows)}\n"


def draw_histograms(records: Sequence[RunRecord], path: Path) -> None:
    """Draw the distances of test images of the same class and of different classes, one panel per record."""
    figure = new_figure(9.2, 6.5)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for record, axis in zip(records, axes.flat, strict=True):
        histogram = record.histogram
        assert histogram is not None
        parts = {"same class": (histogram.same, SAME), "different classes": (histogram.different, DIFFERENT)}
        for label, (counts, color) in parts.items():
            assert counts is not None
            share = [100 * count / max(1.0, sum(counts)) for count in counts]
            axis.stairs(share, histogram.edges, fill=True, color=color, alpha=0.45, label=label)
            axis.stairs(share, histogram.edges, color=color, linewidth=1.2)
        axis.axvspan(0.1, 0.5, color="0.92", zorder=0, label="margin of DP, 0.1 to 0.5")
        axis.set_title(record.objective, fontsize=9, family="monospace")
        accuracy = record.results["kmeans/accuracy"]
        if accuracy is not None:
            where = {"transform": axis.transAxes, "ha": "right", "va": "top"}
            axis.text(0.97, 0.93, f"k-means {100 * accuracy:.0f} %", fontsize=9, **where)
        axis.set_xlim(0, 1)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("distance D = (1 - cosine) / 2 of two test images' embeddings (no unit)", fontsize=10)
    figure.supylabel("share of pairs per bin (%)", fontsize=10)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
