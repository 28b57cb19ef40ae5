"""The models and sizes that are measured; they live in `dynaflow_train.bench`."""

from dynaflow_train.bench.cases import CASES as CASES
from dynaflow_train.bench.cases import Case as Case
from dynaflow_train.bench.models import build as build
