"""The modes of torch.compile, for the encoders of [train] and the networks of agents."""

from __future__ import annotations

from typing import Any, Literal, get_args

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# Modes that replay CUDA graphs. The next step overwrites the outputs of a graph.
GRAPHED: tuple[CompileMode, ...] = ("reduce-overhead", "max-autotune")
ALLOWED = f"True, False or one of {', '.join(map(repr, get_args(CompileMode)))}"
"""What a setting of this kind may be, in words."""


def mode_of(chosen: bool | CompileMode) -> CompileMode:
    """Return the mode of an enabled setting."""
    return "default" if isinstance(chosen, bool) else chosen


def inductor_options(mode: CompileMode) -> dict[str, Any]:
    """Return the mode as options of torch.compile, which takes a mode or options, not both.

    Random numbers are drawn as without compiling, so a second pass repeats those of the first.
    """
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode), "fallback_random": True}
