"""Every error a user can meet: what was asked, what was found, what to do."""

from __future__ import annotations


class DynaFlowError(Exception):
    """Base of all errors raised on purpose by dynaflow_train."""


class RuleError(DynaFlowError, ValueError):
    """A rule (SplitModule, SplitFunc) matches nothing, or cannot be read."""


class CaptureError(DynaFlowError, RuntimeError):
    """A model could not be captured as one forward and one backward graph."""


class SplitError(DynaFlowError, ValueError):
    """The batch cannot be cut as asked."""


class ScheduleError(DynaFlowError, RuntimeError):
    """A strategy issued something illegal; the message shows the plan with an arrow."""


class PlanMismatchError(DynaFlowError, RuntimeError):
    """Ranks made different plans; the message names the rank that differs."""


class RecipeError(DynaFlowError, ValueError):
    """A recipe or an options mapping holds an unknown key or a wrong value."""


class UnsupportedError(DynaFlowError, RuntimeError):
    """A version, device or host feature that dynaflow_train refuses, with the reason."""


class KernelError(DynaFlowError, ValueError):
    """A kernel was asked for that does not exist or cannot run here."""
