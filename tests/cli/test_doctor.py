"""What doctor concludes from what a machine has."""

from __future__ import annotations

import dataclasses

import pytest

from dynaflow_train.config import MULTICAST_OFF, Environment
from dynaflow_train.doctor import Machine, problems, report

GOOD = Machine(
    python=(3, 12, 3),
    packages={
        "torch": "2.13.0+cu130",
        "triton": "3.6.0",
        "transformers": "5.17.0",
        "accelerate": "1.15.0",
        "megatron-core": "0.19.2",
    },
    compiler="/usr/bin/g++",
    gpus=("NVIDIA H200, 141 GiB, sm_90",) * 2,
    peers={(0, 1): True, (1, 0): True},
    nccl="2.28.9",
    environment=Environment(variables=MULTICAST_OFF),
)


def changed(packages: dict | None = None, variables: dict | None = None, **fields) -> Machine:
    if packages is not None:
        fields["packages"] = {**GOOD.packages, **packages}
    if variables is not None:
        fields["environment"] = Environment(variables=variables)
    return dataclasses.replace(GOOD, **fields)


def test_a_good_machine_has_only_the_note_about_accelerate():
    assert [problem.severity for problem in problems(GOOD)] == ["note"]
    assert "DynaFlowCallback" in problems(GOOD)[0].text


@pytest.mark.parametrize(
    ("machine", "severity", "words"),
    [
        (changed({"torch": "2.10.1"}), "broken", "torch 2.10.1 is refused: needs 2.11 or newer"),
        (changed({"torch": "2.11.0+cu130"}), "note", "torch 2.11.0+cu130 computes wrong gradients"),
        (changed({"transformers": "5.9.0"}), "missing", "5.9.0 is refused: needs 5.17 or newer"),
        (changed({"transformers": None}), "missing", "transformers is not installed"),
        (changed({"megatron-core": "0.18.0"}), "missing", "0.18.0 is refused: needs 0.19"),
        (changed({"megatron-core": None}, python=(3, 11, 7)), "missing", "3.12, this is 3.11"),
        (changed({"triton": None}), "missing", "triton is not installed"),
        (changed(compiler=None), "missing", "'executor: eager'"),
        (changed(gloo=False), "missing", "no gloo"),
        (changed(gpus=(), peers={}, nccl=None), "note", "no CUDA device"),
        (changed(gpus=("one",), peers={}), "note", "needs 2, found 1"),
        (changed(nccl=None), "broken", "no NCCL"),
        (changed(peers={(0, 1): False, (1, 0): True}), "slow", "no peer access 0->1:"),
        (changed(variables={}), "note", "NVLink multicast is on"),
        (
            changed(variables={"NCCL_NVLS_ENABLE": "0"}),
            "note",
            "also set TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NVSHMEM_DISABLE_NVLS=1",
        ),
        (
            changed(variables={**MULTICAST_OFF, "NCCL_P2P_DISABLE": "1"}),
            "slow",
            "NCCL_P2P_DISABLE=1",
        ),
        (
            changed(variables={**MULTICAST_OFF, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
            "slow",
            "one hardware queue",
        ),
        (changed(environment=Environment(unknown=("DYNAFLOW_X",))), "note", "DYNAFLOW_X is set"),
    ],
)
def test_each_lack_has_its_reason(machine, severity, words):
    assert words not in "".join(problem.text for problem in problems(GOOD))
    found = [problem for problem in problems(machine) if words in problem.text]
    assert [problem.severity for problem in found] == [severity]


def test_worst_comes_first():
    machine = changed(
        {"torch": "2.10.1", "transformers": None}, variables={"NCCL_P2P_DISABLE": "1"}
    )
    assert [problem.severity for problem in problems(machine)][:3] == ["broken", "missing", "slow"]


@pytest.mark.parametrize("value", ["1", "32"])
def test_the_number_of_connections_is_shown_where_it_is_set(value):
    machine = changed(variables={**MULTICAST_OFF, "CUDA_DEVICE_MAX_CONNECTIONS": value})
    assert ["CUDA_DEVICE_MAX_CONNECTIONS", value] in map(str.split, report(machine).splitlines())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in report(GOOD)


def test_report_has_every_fact():
    lines = [line.split() for line in report(GOOD).splitlines()]
    assert ["transformers", "5.17.0"] in lines
    assert ["P2P", "0->1", "yes"] in lines
    assert ["NVSHMEM_DISABLE_NVLS", "1"] in lines
    assert ["GPU", "1", "NVIDIA", "H200,", "141", "GiB,", "sm_90"] in lines
