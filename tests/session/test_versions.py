"""What a session refuses before it captures anything."""

from __future__ import annotations

import pytest
import torch

from dynaflow_train.errors import UnsupportedError
from dynaflow_train.session import check_torch


def test_an_older_torch_is_refused_with_its_version():
    with pytest.raises(UnsupportedError, match=r"needs torch >= 2\.11, found 2\.10\.1"):
        check_torch("2.10.1+cu128")


def test_this_torch_and_newer_ones_pass():
    check_torch(torch.__version__)
    check_torch("2.13.0a0+git12")
    check_torch("3.0.0")
