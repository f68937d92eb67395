"""Results of tasks as the numbers of a record: each name says the task, and the split where there are several."""

from dipole.text.senteval.scoring import Result

MEASURES = ("pearson", "spearman")


def numbers_of(task: str, result: Result) -> dict[str, float]:
    """Names "senteval/TASK/..." and values, accuracies from 0 to 1.

    A similarity that is learned is Pearson and Spearman on test, with "dev/pearson". One by cosine on given splits is
    both on "dev" and on "test". A year of STS is "pearson" and "spearman" over all pairs, and "_mean" and "_wmean" over
    its data sets.
    """
    if "acc" in result:
        found = {"accuracy": result["acc"] / 100, "dev": result["devacc"] / 100}
        found |= {"f1": result["f1"] / 100} if "f1" in result else {}
    elif "mse" in result:
        found = {measure: result[measure] for measure in MEASURES} | {"dev/pearson": result["devpearson"]}
    elif "dev" in result:
        found = {f"{split}/{measure}": result[split][measure][0] for split in ("dev", "test") for measure in MEASURES}
    else:
        found = {measure: result["all"][measure]["all"] for measure in MEASURES}
        found |= {f"{measure}_{way}": result["all"][measure][way] for measure in MEASURES for way in ("mean", "wmean")}
    return {f"senteval/{task}/{name}": float(value) for name, value in found.items()}
