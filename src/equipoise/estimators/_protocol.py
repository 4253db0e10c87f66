# SPDX-License-Identifier: Apache-2.0
"""What a strategy is: the protocol that layers, experiments, the audit and the command line rely on."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import Record, check_solves, compact_repr
from equipoise.estimators._checks import check_known_keywords
from equipoise.ops import draw_gumbel, draw_uniform
from equipoise.sampling import Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Noise(Record):
    """The randomness of one draw.

    Attributes:
        gumbel: standard Gumbel noise [..., n, k]; [..., m, n, k] for a strategy that averages m solves.
        priority: uniform numbers that decide which rows are dropped; None for a strategy that drops none.
        coin: uniform numbers that decide which rows draw from the flat component, [..., n], or [..., m, n]; None for a
            strategy that mixes nothing in.
        pick: uniform numbers that decide which of m solves is used, [...]; None for a strategy that averages none.

    Example:
        >>> import equipoise as eq
        >>> noise = eq.STRATEGIES["skip-iw"].draw_noise([4, 2])
        >>> noise.gumbel.shape, noise.priority.shape, noise.coin
        (torch.Size([4, 2]), torch.Size([4]), None)
    """

    gumbel: Float[Tensor, "*batch n k"]
    priority: Float[Tensor, "*problems n"] | None = None
    coin: Float[Tensor, "*batch n"] | None = None
    pick: Float[Tensor, "..."] | None = None

    def __repr__(self) -> str:
        """Shows the shapes of what there is."""
        return compact_repr(self, gumbel=self.gumbel, priority=self.priority, coin=self.coin, pick=self.pick)


def draw_noise(
    shape: Sequence[int],
    *,
    priority: bool = True,
    coin: bool = False,
    solves: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Noise:
    """Draws the noise for logits of a shape: Gumbel, priorities, coins, picks, in this order.

    So the Gumbel noise of a seed is the same whether or not the others are drawn too.

    Args:
        shape: [..., n, k].
        priority: whether to draw priorities too.
        coin: whether to draw coins too.
        solves: m: draw Gumbel noise and coins for m solves, and a pick among them. None: noise for one solve, without
            this dimension.
        generator: where the randomness comes from; None is torch's global stream of the device.
        dtype: None is torch's default.
        device: None is the generator's device if there is one, else torch's default.

    Returns:
        The noise.

    Example:
        >>> noise = draw_noise([4, 2], generator=torch.Generator().manual_seed(0))
        >>> noise.gumbel.shape, noise.priority.shape
        (torch.Size([4, 2]), torch.Size([4]))
        >>> noise = draw_noise([5, 4, 2], priority=False, solves=8)
        >>> noise.gumbel.shape, noise.pick.shape
        (torch.Size([5, 8, 4, 2]), torch.Size([5]))
    """
    *batch, n, k = shape
    if solves is not None:
        check_solves(solves)
    gumbel = draw_gumbel(
        shape if solves is None else [*batch, solves, n, k], generator=generator, dtype=dtype, device=device
    )

    def uniform(shape: Sequence[int]) -> Tensor:
        return draw_uniform(shape, generator=generator, dtype=dtype, device=gumbel.device)

    return Noise(
        gumbel,
        uniform([*batch, n]) if priority else None,
        uniform(gumbel.shape[:-1]) if coin else None,
        None if solves is None else uniform(batch),
    )


@runtime_checkable
class Strategy(Protocol):
    """A way to sample experts, with the weights that go with it. Any object with these members is one.

    No base class is needed. `StrategyTraits` lists optional members, with their defaults.

    Example:
        >>> import equipoise as eq
        >>> strategy = eq.STRATEGIES["gm-iw"]
        >>> isinstance(strategy, Strategy), strategy.unbiased, strategy.respects_capacity
        (True, True, True)
    """

    @property
    def name(self) -> str:
        """The name on the command line and in results."""
        ...

    @property
    def label(self) -> str:
        """The name in figures."""
        ...

    @property
    def respects_capacity(self) -> bool:
        """Whether no expert ever processes more rows than its capacity."""
        ...

    @property
    def unbiased(self) -> bool:
        """Whether the estimate with importance weights is claimed to be unbiased. The audit checks the claim."""
        ...

    def draw_noise(
        self,
        shape: Sequence[int],
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Noise:
        """Draws the noise that `draw` needs for logits of this shape [..., n, k]."""
        ...

    def draw(
        self,
        log_p: Float[Tensor, "*batch n k"],
        noise: Noise,
        *,
        temperature: float | int | Float[Tensor, "*#batch"] = 1.0,
        capacity: int | Sequence[int] | Int[Tensor, "..."] | None = None,
        mask: Bool[Tensor, "*batch n"] | None = None,
        sinkhorn_first: bool = False,
        importance: bool = True,
    ) -> tuple[Sample, Float[Tensor, "*batch n"]]:
        """Samples as a pure function of log_p and noise, and returns each row's weight in the estimate."""
        ...


@dataclass(frozen=True, kw_only=True)
class StrategyTraits:
    """The optional attributes of a strategy, with their defaults.

    Attributes:
        assigns_all: whether every row gets an expert that processes it. A strategy that also respects the capacity then
            needs one that holds all rows.
        mixes: whether a flat proposal is mixed in: `draw` takes `eps`, and `with_options(eps=)` sets it.
        averages: whether conditionals are averaged over several solves; `with_options(solves=)` sets their number.
        paper: whether it is one of the paper's strategies.

    Example:
        >>> StrategyTraits().mixes, StrategyTraits().averages
        (False, False)
    """

    assigns_all: bool = False
    mixes: bool = False
    averages: bool = False
    paper: bool = False


def read_traits(kind: type[T], of: object) -> T:
    """Reads the optional attributes of an object, with the defaults for those that it does not have.

    Args:
        kind: a dataclass of attributes with defaults, such as `StrategyTraits`.
        of: any object.

    Returns:
        The attributes.

    Example:
        >>> from equipoise.estimators import STRATEGIES
        >>> read_traits(StrategyTraits, STRATEGIES["gm-iw-mix"]).mixes, read_traits(StrategyTraits, object()).mixes
        (True, False)
    """
    names = [field.name for field in fields(cast(Any, kind))]
    return kind(**{name: getattr(of, name) for name in names if hasattr(of, name)})


_ATTRIBUTES = {"name": str, "label": str, "respects_capacity": bool, "unbiased": bool}
_METHODS = {
    "draw_noise": ("generator", "dtype", "device"),
    "draw": ("temperature", "capacity", "mask", "sinkhorn_first", "importance"),
}


def check_strategy(strategy: object) -> Strategy:
    """Requires an object that meets `Strategy`, and returns it.

    Args:
        strategy: the object to check.

    Returns:
        The same object.

    Raises:
        ValueError: a member is missing or of another type, or a method lacks a keyword.

    Example:
        >>> import equipoise as eq
        >>> check_strategy(eq.STRATEGIES["gm-iw"]).name
        'gm-iw'
        >>> check_strategy(object())
        Traceback (most recent call last):
        ValueError: strategy 'object' must have an attribute name of type str, got none: see ...
    """
    who = f"strategy {getattr(strategy, 'name', type(strategy).__name__)!r}"
    for attribute, kind in _ATTRIBUTES.items():
        if not isinstance(getattr(strategy, attribute, None), kind):
            got = repr(getattr(strategy, attribute)) if hasattr(strategy, attribute) else "none"
            raise ValueError(
                f"{who} must have an attribute {attribute} of type {kind.__name__}, got {got}: "
                "see equipoise.estimators.Strategy for what a strategy needs"
            )
    for field in fields(StrategyTraits):
        value = getattr(strategy, field.name, field.default)
        if not isinstance(value, bool):
            raise ValueError(
                f"{who} must have an attribute {field.name} of type bool, or none, got {value!r}: "
                "see equipoise.estimators.StrategyTraits for what a strategy may have"
            )
    for method, keywords in _METHODS.items():
        function = getattr(strategy, method, None)
        if not callable(function):
            raise ValueError(
                f"{who} must have a method {method}, got {'none' if function is None else repr(function)}: "
                "see equipoise.estimators.Strategy for what a strategy needs"
            )
        check_known_keywords(f"{method} of {who}", _keywords(function, keywords), keywords)
    return cast(Strategy, strategy)


def _keywords(function: Callable[..., Any], wanted: Sequence[str]) -> Sequence[str]:
    """Lists the keywords a function takes; all that are wanted if it takes **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return wanted
    return [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


def import_strategy(path: str) -> Strategy:
    """Imports a strategy of a user's own.

    Args:
        path: "package.module:name".

    Returns:
        The object of that name, checked.
    """
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"strategy must be the name of a known one or package.module:name, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"strategy must be in a module that can be imported, got {path!r} ({error}): "
            "install its package or add its folder to PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"strategy must name an object of its module, got {path!r}: {module_name} has no {attribute}")
    return check_strategy(getattr(module, attribute))
