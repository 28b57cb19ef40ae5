"""Graphs -> named ops and the values between them; dgrad and wgrad apart."""

from dynaflow_train.partition.collectives import drop_waits, ragged_nodes
from dynaflow_train.partition.cut import Verdicts, cut

__all__ = ["Verdicts", "cut", "drop_waits", "ragged_nodes"]
