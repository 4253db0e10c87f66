# SPDX-License-Identifier: Apache-2.0
"""`Ranks`: the processes of a mesh, and the messages between them.

Every collective goes through here, so that a rank that is missing ends in one error that says what to look for.
"""

import atexit
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

EXPERT_AXIS = "expert"
"""The axis of a mesh over which experts are spread; a mesh of one axis needs no name."""


class RankError(RuntimeError):
    """A collective did not complete: another rank ended, raised an error, or runs something else.

    Example:
        One rank that announces more rows than it has:

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("expert",))
        >>> try:
        ...     Ranks(mesh).all_to_all(torch.zeros(3, 8), receive=[4], send=[4])
        ... except RankError as error:
        ...     print(error)
        an exchange of tokens did not complete on rank 0: another rank ended, raised an error, ...
        >>> dist.destroy_process_group()
    """


@dataclass
class Sent:
    """Messages that a rank sent to others, as if collectives were rings, and the bytes in them."""

    messages: int = 0
    bytes: int = 0

    def add(self, messages: int, size: int) -> None:
        """Counts messages of so many bytes in all."""
        self.messages += messages
        self.bytes += size


class Ranks:
    """The processes of a mesh: those that share experts, those that hold the same ones, and all of them.

    A process group can be neither copied nor pickled. A copy of a model talks through the same groups, so copying
    returns this object; pickling is refused.

    Attributes:
        mesh: the mesh.
        expert_mesh: its expert axis.
        rank: of this process, among all of the mesh, in the order of the mesh.
        size: of the mesh.
        expert_size: of the expert axis.
        data_size: how many hold the same experts.
        sent: what this rank sent so far, by kind.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Finds the groups of a mesh.

        Args:
            mesh: with an axis "expert", or of one axis.
        """
        self.mesh = mesh
        self.expert_mesh = mesh if mesh.ndim == 1 else mesh[EXPERT_AXIS]
        self.size, self.expert_size = mesh.size(), self.expert_mesh.size()
        self.data_size = self.size // self.expert_size
        group = whole_group(mesh)
        # Weak references: a group that somebody holds keeps its threads when it is destroyed.
        self._expert_group, self._group, self._host_group = map(
            ref, (self.expert_mesh.get_group(), group, _host_group(group))
        )
        atexit.register(_forget_groups, mesh)
        self.members: list[int] = mesh.mesh.flatten().tolist()
        self.rank = self.members.index(dist.get_rank())
        names = [name for name in mesh.mesh_dim_names or () if name != EXPERT_AXIS] if mesh.ndim > 1 else []
        self._data_groups = [ref(mesh.get_group(name)) for name in names]
        self.sent = {kind: Sent() for kind in ("tokens", "counts", "sums", "rows", "sizes")}

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Returns the sum, "max" or "min" of a tensor over all ranks; x stays as it is.

        Args:
            x: of one shape on all ranks.
            op: which.
        """
        out = x.detach().clone().contiguous()
        kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        others = self.size - 1
        self.sent["sums"].add(2 * others, 2 * others * out.numel() * out.element_size() // self.size)
        with explained("a sum over all ranks"):
            dist.all_reduce(out, kinds[op], group=_existing(self._group))
        return out

    def average_over_data(self, x: Tensor) -> None:
        """Averages a tensor in place over the ranks that hold the same experts."""
        with explained("the average of the experts' gradients"):
            for group in self._data_groups:
                dist.all_reduce(x, group=_existing(group))
        x.div_(self.data_size)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Returns the tensor of every rank, in the order of the mesh; they may differ in their number of rows.

        Args:
            x: [rows, ...].
        """
        x = x.detach().contiguous()
        sizes = self.gather_numbers([x.shape[0]])()
        most = max(size for (size,) in sizes)
        padded = x if x.shape[0] == most else torch.cat([x, x.new_zeros([most - x.shape[0], *x.shape[1:]])])
        out = [torch.empty_like(padded) for _ in range(self.size)]
        self.sent["rows"].add(self.size - 1, (self.size - 1) * padded.numel() * padded.element_size())
        with explained("a gathering of rows"):
            dist.all_gather(out, padded, group=_existing(self._group))
        return [part[:size] for part, (size,) in zip(out, sizes, strict=True)]

    def gather_numbers(self, numbers: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Tells all ranks a few numbers that the host knows; no device waits for it.

        Args:
            numbers: as many on every rank.

        Returns:
            A function that waits for the numbers of every rank and returns them.
        """
        own = torch.tensor(list(numbers), dtype=torch.int64)
        out = [torch.empty_like(own) for _ in range(self.size)]
        self.sent["sizes"].add(self.size - 1, (self.size - 1) * own.numel() * own.element_size())
        with explained("an exchange of sizes"):
            work: Any = dist.all_gather(out, own, group=_existing(self._host_group), async_op=True)

        def wait() -> list[list[int]]:
            with explained("an exchange of sizes"):
                work.wait()
            return [part.tolist() for part in out]

        return wait

    def gather_objects(self, value: object) -> list[Any]:
        """Returns a small object of every rank, in the order of the mesh."""
        out: list[Any] = [None] * self.size
        with explained("a comparison of settings"):
            dist.all_gather_object(out, value, group=_existing(self._host_group))
        return out

    def broadcast(self, x: Tensor) -> None:
        """Overwrites a tensor with the first rank's."""
        with explained("a broadcast of parameters"):
            dist.broadcast(x, self.members[0], group=_existing(self._group))

    def all_to_all(self, x: Tensor, receive: Sequence[int] | None = None, send: Sequence[int] | None = None) -> Tensor:
        """Sends a part of the rows to each rank of the expert axis, and returns what they send.

        Args:
            x: rows, in the order of the ranks that they are for.
            receive: rows from each rank; None: as many from each, as many as are sent.
            send: rows for each rank; None: as many for each.
        """
        rows = x.shape[0] if receive is None else sum(receive)
        out = x.new_empty([rows, *x.shape[1:]])
        splits: list[Any] = [None if part is None else list(part) for part in (receive, send)]
        mine = x.shape[0] // self.expert_size if send is None else send[self.expert_mesh.get_local_rank()]
        row = x.element_size() * (x[:1].numel() if x.shape[0] else 0)
        kind = "tokens" if x.is_floating_point() else "counts"
        self.sent[kind].add(self.expert_size - 1, (x.shape[0] - mine) * row)
        with explained("an exchange of tokens"):
            dist.all_to_all_single(out, x.contiguous(), *splits, group=_existing(self._expert_group))
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        """Returns this object: a copy of a model talks through the same groups."""
        return self

    def __copy__(self) -> "Ranks":
        """Returns this object."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled."""
        raise TypeError(
            "a parallelised model must not be pickled, since its process groups exist in this process only: save "
            "equipoise.distributed.TrainingState, or model.state_dict(), with torch.distributed.checkpoint"
        )

    def __repr__(self) -> str:
        """Shows the sizes."""
        return f"Ranks(experts={self.expert_size}, data={self.data_size})"


@contextmanager
def explained(what: str) -> Generator[None]:
    """Turns an error of the communication library into one that says what to look for.

    Args:
        what: was going on.
    """
    try:
        yield
    except RankError:
        raise
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RankError(
            f"{what} did not complete on rank {dist.get_rank()}: another rank ended, raised an error, or runs "
            "something else. Look for the first error among the logs of all ranks, then go on from the last "
            f"checkpoint. ({first})"
        ) from error


def whole_group(mesh: DeviceMesh) -> Any:
    """Returns the group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return mesh._flatten().get_group()  # pyright: ignore[reportPrivateUsage]


def _host_group(group: Any) -> Any:
    """Returns a group of the same ranks that takes tensors on the CPU: the group itself, if it does."""
    if any(device.type == "cpu" for device in group._device_types):
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def _existing(group: ref[Any]) -> Any:
    """Returns a process group, which must not have been destroyed."""
    found = group() if dist.is_initialized() else None
    if found is None:
        raise RankError(
            "process groups must exist while a parallelised model is used, but those of its mesh were destroyed: call "
            "destroy_process_group last"
        )
    return found


def _forget_groups(mesh: DeviceMesh) -> None:
    """Lets a mesh forget its process groups, if they were destroyed: called when the interpreter is about to end.

    torch keeps the meshes of DTensors, and those keep their groups, so `destroy_process_group` does not end the threads
    of gloo. One of them that drops its last message while the interpreter ends would abort the process.
    """
    if not dist.is_initialized():
        for part in (mesh, mesh._get_root_mesh()):  # pyright: ignore[reportPrivateUsage]
            getattr(part, "_pg_registry", {}).clear()
