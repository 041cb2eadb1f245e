"""Paceline: exact speculative sampling. The public names, imported when first used so that the package imports fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.checkpoints.load import load
    from paceline.engine.llm import LLM
    from paceline.engine.outputs import Completion
    from paceline.sampling.params import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "__version__", "load"]

_HOMES = {
    "LLM": "paceline.engine.llm",
    "Completion": "paceline.engine.outputs",
    "SamplingParams": "paceline.sampling.params",
    "load": "paceline.checkpoints.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
