"""Images: data, views, encoders, frameworks and probes; and LMCL's planar study (`toy`)."""

from dipole.core.ground.moved import forward

# Names of earlier versions.
forward(
    __name__,
    {
        "carry": "compatibility",
        "detectron": "export.detectron2",
        "drawing": "dipole.core.ground.drawing",
        "evaluation": "probes",
        "methods": "frameworks",
        "picture": "pictures",
        "planar": "toy.planar",
        "stream": "decoding",
    },
)
