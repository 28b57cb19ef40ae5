"""Plans -> callables: memory, lanes, the interpreter, the fast path."""

from dynaflow_train.execute.compile import OpCompiler
from dynaflow_train.execute.measure import measure
from dynaflow_train.execute.records import Record
from dynaflow_train.execute.runner import Entry, GraphFacts, Runner

__all__ = ["Entry", "GraphFacts", "OpCompiler", "Record", "Runner", "measure"]
