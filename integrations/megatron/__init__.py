"""Megatron-core: layers that are captured whole, and the flags that schedule them."""

from .compiling import compile, undo
from .seams import Applied, apply
from .versions import check_model, check_version

__all__ = ["Applied", "apply", "check_model", "check_version", "compile", "undo"]
