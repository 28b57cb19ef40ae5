"""Where the batch lies in every value, what may be cut, what runs merged, what is summed."""

from dynaflow_train.split.analyse import Analysis, analyse
from dynaflow_train.split.axis import Info

__all__ = ["Analysis", "Info", "analyse"]
