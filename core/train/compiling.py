"""The modes of torch.compile, for the encoders of [train] and the networks of agents."""

from __future__ import annotations

from typing import Any, Literal, get_args

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# Those that replay what they compiled as CUDA graphs, whose outputs the next step overwrites.
GRAPHED: tuple[CompileMode, ...] = ("reduce-overhead", "max-autotune")
ALLOWED = f"True, False or one of {', '.join(map(repr, get_args(CompileMode)))}"
"""What a setting of this kind may be, in words."""


def mode_of(chosen: bool | CompileMode) -> CompileMode:
    """The mode of a setting that is on."""
    return "default" if isinstance(chosen, bool) else chosen


def inductor_options(mode: CompileMode) -> dict[str, Any]:
    """The mode as options of torch.compile, which takes either, not both; random numbers are as without compiling.

    So a second pass draws those of the first.
    """
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode), "fallback_random": True}
