"""Sentence encoders trained on running text, and SentEval's tasks to judge any encoder by."""

from dipole.core.ground.moved import forward

# Names of earlier versions.
forward(
    __name__,
    {
        "documents": "document_classification",
        "evaluation": "neighbours",
        "logistic": "dipole.core.measure.logistic",
        "probes": "senteval.protocols",
        "recurrent": "encoders.recurrent",
        "relatedness": "senteval.relatedness",
        "senteval_tasks": "senteval.tasks",
        "stepped": "senteval.torch_classifier",
        "tables": "senteval.tables",
    },
)
