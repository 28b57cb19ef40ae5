"""Process groups that a stream has for itself: the same ranks, a communicator with other options.

Such a group lives until the host destroys all groups, not until `df.undo`: torch names groups by
their ranks and by how many there are, so that the next one would get the name of one that was
destroyed, and find what that one left in the store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dynaflow_train.errors import PlanMismatchError
from dynaflow_train.execute.collectives import DIRECT, resolve
from dynaflow_train.execute.lanes import HIGH, NORMAL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from dynaflow_train.config import StreamOptions
    from dynaflow_train.ir import Plan, Region

NAME = "nccl"


@dataclass
class Groups:
    """Made once for each stream with options and each group that collectives on it name.

    Attributes:
        options: by stream.
        heard: name of a group, text -> the texts that its ranks say in this place.
        warn: tells a text once.
        made: stream, name of a group -> the group in its place; None where there can be none.
        says: what became of the options, for people.
    """

    options: Mapping[str, StreamOptions]
    heard: Callable[[str, str], Sequence[str]]
    warn: Callable[[str], None]
    made: dict[tuple[str, str], dist.ProcessGroup | None] = field(default_factory=dict)
    says: dict[str, None] = field(default_factory=dict)

    @property
    def priorities(self) -> dict[str, int]:
        """Of streams that have one, as CUDA counts."""
        given = {stream: options.priority for stream, options in self.options.items()}
        return {s: HIGH if p == "high" else NORMAL for s, p in given.items() if p is not None}

    def of(
        self, plan: Plan, region: Region, device: torch.device
    ) -> dict[tuple[str, str], dist.ProcessGroup]:
        """The plan's groups, by stream and by the name of the group in whose place they are.

        No rank waits here for one that does not come: the ranks of a group have compared this plan
        before, and all walk its launches in the same order. One without the options is silent when
        they compare those, which ends in an error.

        Raises:
            PlanMismatchError: the ranks of a group have other options, or other groups.
        """
        found: dict[tuple[str, str], dist.ProcessGroup] = {}
        for launch in plan.launches if self.options else ():
            for op in (region.op[name] for name in launch.ops):
                if launch.stream not in self.options or op.group is None:
                    continue
                if launch.kernel is not None or op.collective not in DIRECT:
                    what = launch.kernel or op.collective
                    self._none(launch.stream, f"{what} does not go through its process group")
                    continue
                key = launch.stream, op.group
                if key not in self.made:
                    self.made[key] = self._make(*key, device)
                if (group := self.made[key]) is not None:
                    found[key] = group
        return found

    def why_not(self, group: dist.ProcessGroup, device: torch.device) -> str:
        """Why a group cannot be made again with options; empty if it can."""
        backend, ranks = group._get_backend(device).name(), dist.get_process_group_ranks(group)
        whole = dist.distributed_c10d._get_default_group()
        if backend != NAME:
            return f"the group is {backend}, not {NAME}"
        if ranks != sorted(ranks):
            return "the group's ranks are not in order, and those of a new group always are"
        if whole.bound_device_id is not None and len(ranks) < whole.size():
            return (
                "init_process_group was given a device_id: torch then makes a group by splitting "
                "the communicator of all ranks, and this one has only some. Leave device_id out"
            )
        return ""

    def _make(self, stream: str, name: str, device: torch.device) -> dist.ProcessGroup | None:
        group, options = resolve(name), self.options[stream]
        if why := self.why_not(group, device):
            self._none(stream, why)
            return None
        backend, ranks = group._get_backend(device), dist.get_process_group_ranks(group)
        # Under another name a rank would wait in another part of the store, for minutes.
        called = dist.distributed_c10d._process_group_name(ranks, use_hashed_name=True)
        texts = self.heard(name, f"{stream}: {options}; as group {called}")
        if len(set(texts)) > 1:
            listed = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
            raise PlanMismatchError(
                f"the ranks of group {name} have other nccl options, or made other process groups "
                f"before (the name counts them):\n{listed}\nGive all ranks the same recipe."
            )
        timeout = getattr(backend, "options", None) and backend.options._timeout
        self.says[f"nccl, stream {stream!r}: a communicator of its own, {options}"] = None
        made: Any = dist.new_group(  # never an int: this rank is a member
            ranks,
            timeout,
            backend.name(),
            _for_nccl(options, timeout) if backend.name() == NAME else None,
            use_local_synchronization=True,
            group_desc=f"dynaflow {stream}",
        )
        return made

    def _none(self, stream: str, why: str) -> None:
        text = f"nccl, stream {stream!r}: its options have no effect: {why}."
        self.says[text] = None
        self.warn(text)


def _for_nccl(options: StreamOptions, timeout: Any) -> Any:
    """In torch's form."""
    found = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.priority == "high")
    if timeout is not None:
        found._timeout = timeout
    if options.max_ctas is not None:
        found.config.max_ctas = options.max_ctas
    if options.min_ctas is not None:
        found.config.min_ctas = options.min_ctas
    return found
