"""dynaflow_train: communication beside compute in training, forward and backward."""

from dynaflow_train.annotate import SplitFunc as SplitFunc
from dynaflow_train.annotate import SplitModule as SplitModule
from dynaflow_train.annotate import mark as mark
from dynaflow_train.api import compile as compile
from dynaflow_train.api import explain as explain
from dynaflow_train.api import plans as plans
from dynaflow_train.api import undo as undo
from dynaflow_train.api import verify as verify
from dynaflow_train.config import Recipe as Recipe
from dynaflow_train.session import DynaFlowWarning as DynaFlowWarning
from dynaflow_train.strategy import Scheduler as Scheduler
from dynaflow_train.strategy import Strategy as Strategy
