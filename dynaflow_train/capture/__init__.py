"""Dynamo's graph -> forward and backward aten graphs, with symbolic batch and saved-value slots."""

from dynaflow_train.capture.aot import Captured, Compilers, capture
from dynaflow_train.capture.gradients211 import correct_gradients
from dynaflow_train.capture.inputs import BatchInputs, make_batch_symbolic
from dynaflow_train.capture.labels import stamp
from dynaflow_train.capture.shards import localise

__all__ = [
    "BatchInputs",
    "Captured",
    "Compilers",
    "capture",
    "correct_gradients",
    "localise",
    "make_batch_symbolic",
    "stamp",
]
