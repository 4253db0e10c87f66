# SPDX-License-Identifier: Apache-2.0
"""`record_routing` and `replay_routing`: a second forward pass that takes the experts and weights of the first.

Trainers of reinforcement learning need it: the rollout was generated with one routing, and training that routes anew
computes the likelihood of a model that did not write the text.

Legend: T rows (tokens), E experts, K experts a row.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from equipoise.integrations.transformers._layer import RoutedBlock, layer_of, routed_blocks
from equipoise.nn import Router, Routing
from equipoise.nn._capture import within_backward


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedCall:
    """The decisions of one layer in one forward pass.

    Attributes:
        indices: the experts that processed each row; E for "no expert".
        wanted: the experts that each row drew or chose, in order; `indices` before the capacity dropped any.
        scores: the factor of each expert's output.
        log_prob: the router's log-probability of all experts in `wanted`, in their order (Plackett-Luce).

    Example:
        One sequence of three tokens with one expert each; the last one was dropped.

        >>> call = RecordedCall(
        ...     indices=torch.tensor([[[0], [1], [2]]]),
        ...     wanted=torch.tensor([[[0], [1], [1]]]),
        ...     scores=torch.tensor([[[1.0], [1.0], [0.0]]]),
        ...     log_prob=torch.zeros(1, 3),
        ... )
        >>> (call.indices == call.wanted).squeeze(-1)
        tensor([[ True,  True, False]])
    """

    indices: Int[Tensor, "*shape K"]
    wanted: Int[Tensor, "*shape K"]
    scores: Float[Tensor, "*shape K"]
    log_prob: Float[Tensor, "*shape"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingRecord:
    """The decisions of the routed layers of a model, call by call.

    Attributes:
        layers: the calls of each layer, by its name. `torch.save` and `torch.load` take the record; to move it, move
            its tensors.

    Example:
        A prompt of three tokens, then one token with a cache:

        >>> def call(positions):
        ...     z = torch.zeros(1, positions, 1, dtype=torch.int64)
        ...     return RecordedCall(indices=z, wanted=z, scores=z + 1.0, log_prob=torch.zeros(1, positions))
        >>> record = RoutingRecord(layers={"model.layers.0.mlp": [call(3), call(1)]})
        >>> record.joined()["model.layers.0.mlp"].indices.shape
        torch.Size([1, 4, 1])
    """

    layers: Mapping[str, Sequence[RecordedCall]]

    def joined(self) -> dict[str, RecordedCall]:
        """Joins the calls of each layer along the positions: the prompt, then token after token with a cache.

        Returns:
            One call for each layer, of the whole sequences.

        Raises:
            ValueError: nothing was recorded, or the calls were of different batches.
        """
        calls = {name: list(calls) for name, calls in self.layers.items()}
        if not calls or not all(calls.values()):
            raise ValueError(
                "record must hold at least one forward pass of every layer, got none: call the model within "
                "record_routing"
            )
        return {name: _join(name, of_layer) for name, of_layer in calls.items()}


class Replay:
    """A replay, with the probability of the recorded decisions under the present routers.

    Attributes:
        log_ratios: of each layer, log p_now(wanted) - log p_then(wanted) for every token, with gradient for the present
            router; filled by the forward pass.

    Example:
        `replay_routing` yields one; filled by hand, for two layers and two tokens:

        >>> replay = Replay()
        >>> replay.log_ratios["model.layers.0.mlp"] = torch.tensor([[0.0, 2.0]]).log1p()
        >>> replay.log_ratios["model.layers.1.mlp"] = torch.tensor([[1.0, 1.0]]).log1p()
        >>> replay.ratio()
        tensor([[2., 6.]])
    """

    def __init__(self) -> None:
        self.log_ratios: dict[str, Tensor] = {}

    def log_ratio(self) -> Float[Tensor, "*shape"]:
        """Sums over the layers: the log importance ratio of each token's routing.

        Returns:
            One number a token, with gradient.

        Raises:
            ValueError: the model has not run yet.
        """
        if not self.log_ratios:
            raise ValueError(
                "the model must have run within replay_routing before a ratio is read, got no forward pass"
            )
        return torch.stack(list(self.log_ratios.values())).sum(0)

    def ratio(self) -> Float[Tensor, "*shape"]:
        """Returns the importance ratio of each token's routing, over all layers; see `log_ratio`."""
        return self.log_ratio().exp()


@contextmanager
def record_routing(model: nn.Module) -> Generator[RoutingRecord]:
    """Records what every routed layer decides, in any number of forward passes, such as those of `generate`.

    Args:
        model: with swapped routers; `swap_routers(model, "topk")` leaves the model's function as it is.

    Yields:
        The record, which grows as the model runs.

    Example:
        >>> import torch
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> from equipoise.integrations.transformers import swap_routers
        >>> small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_key_value_heads=2, **small))
        >>> names = swap_routers(model, "topk")
        >>> tokens = torch.randint(16, (2, 5))
        >>> with record_routing(model) as record:
        ...     logits = model(tokens).logits
        >>> {name: call.indices.shape for name, call in record.joined().items()}
        {'model.layers.0.mlp': torch.Size([2, 5, 2])}
    """
    calls: dict[str, list[RecordedCall]] = {name: [] for name, _ in _routed(model)}

    def decider(name: str, _: RoutedBlock) -> "_Decide":
        def decide(routing: Routing) -> Routing:
            if not within_backward():  # a checkpoint recomputes what is recorded already
                calls[name].append(_recorded(routing))
            return routing

        return decide

    with _deciding(model, decider):
        yield RoutingRecord(layers=calls)


@contextmanager
def replay_routing(model: nn.Module, record: RoutingRecord) -> Generator[Replay]:
    """Makes forward passes take the experts and weights of a record.

    The factors of the experts' outputs have the recorded values, and the gradient of the present router's factors at
    the same experts (none where the router is not gated). Several recorded calls are joined along the positions: the
    record of `generate` fits one forward pass over the prompt and the answer without its last token. With activation
    checkpointing, call backward within the replay too, since it runs the layers again.

    Args:
        model: with swapped routers, in training or evaluation mode.
        record: a record of the same layers.

    Yields:
        The replay, for the importance ratios.

    Raises:
        ValueError: the record is of other layers, or, in the forward pass, of other shapes.

    Example:
        >>> import torch
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> from equipoise.integrations.transformers import swap_routers
        >>> small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_key_value_heads=2, **small))
        >>> names = swap_routers(model, "topk")
        >>> tokens = torch.randint(16, (2, 5))
        >>> with record_routing(model) as record:
        ...     first = model(tokens).logits
        >>> with replay_routing(model, record) as replay:
        ...     again = model(tokens).logits
        >>> torch.equal(first, again), replay.ratio().shape
        (True, torch.Size([2, 5]))
    """
    joined = record.joined()
    names = [name for name, _ in _routed(model)]
    if sorted(names) != sorted(joined):
        raise ValueError(
            f"record must be of the model's routed layers {', '.join(names)}, got {', '.join(joined)}: swap the "
            f"same layers"
        )
    replay = Replay()

    def decider(name: str, block: RoutedBlock) -> "_Decide":
        def decide(routing: Routing) -> Routing:
            call, router = joined[name], block.routed_gate.router
            if tuple(call.indices.shape[:-1]) != routing.shape:
                raise ValueError(
                    f"a replayed forward pass must have the recorded shape {list(call.indices.shape[:-1])}, got "
                    f"{list(routing.shape)} in {name!r}: the last token of generate was never an input"
                )
            now = log_prob(routing.log_p, call.wanted.flatten(0, -2)).reshape(routing.shape)
            if not within_backward():  # a checkpoint computes the same again, and its graph leads nowhere
                replay.log_ratios[name] = now - call.log_prob
            return _replayed(routing, call, router)

        return decide

    with _deciding(model, decider):
        yield replay


_Decide = Callable[[Routing], Routing]


def log_prob(log_p: Float[Tensor, "T E"], wanted: Int[Tensor, "T K"]) -> Float[Tensor, "T"]:
    """Computes the log-probability of K different experts in their order, drawn one after the other without return.

    Args:
        log_p: the router's.
        wanted: the experts; E, "no expert", adds nothing.

    Returns:
        With gradient.

    Example:
        >>> log_prob(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0, 1]])).exp()  # 0.5 * 0.3 / (0.3 + 0.2)
        tensor([0.3000])
    """
    total, rest = log_p.new_zeros(log_p.shape[0]), log_p
    for z in wanted.unbind(-1):
        z = z.unsqueeze(-1)
        at = z.clamp_max(log_p.shape[-1] - 1)
        term = (rest.gather(1, at) - rest.logsumexp(-1, keepdim=True)).squeeze(-1)
        total = total + torch.where(z.squeeze(-1) < log_p.shape[-1], term, 0.0)
        rest = torch.where(
            torch.zeros_like(rest, dtype=torch.bool).scatter(1, at, z < log_p.shape[-1]), -torch.inf, rest
        )
    return total


def _routed(model: nn.Module) -> list[tuple[str, RoutedBlock]]:
    """Returns the routed layers by name, of which there must be one."""
    found = routed_blocks(model)
    if not found:
        raise ValueError(
            f"model must have routers of ours, got {type(model).__name__} without any: swap_routers(model, "
            "'topk') gives it those and leaves its function as it was"
        )
    return found


@contextmanager
def _deciding(model: nn.Module, decider: "Callable[[str, RoutedBlock], _Decide]") -> Generator[None]:
    """Sets what changes or sees the decisions of all layers, after what already does."""
    blocks = _routed(model)
    before = [layer_of(block).decide for _, block in blocks]
    for (name, block), earlier in zip(blocks, before, strict=True):
        layer_of(block).decide = _then(earlier, decider(name, block))
    try:
        yield
    finally:
        for (_, block), earlier in zip(blocks, before, strict=True):
            layer_of(block).decide = earlier


def _then(first: _Decide | None, second: _Decide) -> _Decide:
    """Chains two deciders."""
    return second if first is None else lambda routing: second(first(routing))


@torch.no_grad()
def _recorded(routing: Routing) -> RecordedCall:
    """Keeps what a replay needs."""
    wanted = routing.indices if routing.sample is None else routing.sample.z_rounds
    return RecordedCall(
        indices=routing.indices.detach().unflatten(0, routing.shape),
        wanted=wanted.detach().unflatten(0, routing.shape),
        scores=routing.scores.detach().unflatten(0, routing.shape),
        log_prob=log_prob(routing.log_p, wanted).detach().reshape(routing.shape),
    )


def _replayed(routing: Routing, call: RecordedCall, router: Router) -> Routing:
    """Returns the recorded decision with the present router's gradient."""
    indices, wanted, scores = (x.flatten(0, -2) for x in (call.indices, call.wanted, call.scores))
    if router.traits.gated and router.scoring is not None:
        now = router.scoring.factors(routing.logits, wanted)
        scores = torch.where(indices < routing.num_experts, scores + (now - now.detach()), 0.0)
    nothing = {
        "sample": None,
        "gap": None,
        "work": None,
        "capacity": None,
        "exactly_balanced": False,
        "own_log_p": None,
    }
    return replace(
        routing, indices=indices, scores=scores, weight=torch.ones_like(routing.weight), score_function=False, **nothing
    )


def _join(name: str, calls: list[RecordedCall]) -> RecordedCall:
    """Joins calls of the same sequences along the positions."""
    if len({(*call.indices.shape[:-2], call.indices.shape[-1]) for call in calls}) > 1:
        shapes = [list(call.indices.shape[:-1]) for call in calls]
        raise ValueError(
            f"recorded calls must be of the same sequences, got shapes {shapes} in {name!r}: record one rollout "
            f"at a time"
        )
    return RecordedCall(
        indices=torch.cat([call.indices for call in calls], -2),
        wanted=torch.cat([call.wanted for call in calls], -2),
        scores=torch.cat([call.scores for call in calls], -2),
        log_prob=torch.cat([call.log_prob for call in calls], -1),
    )
