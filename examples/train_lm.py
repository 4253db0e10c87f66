# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level transformer with mixtures of experts on a folder of text, with any router of equipoise.

    python examples/train_lm.py                           # the standard library's sources, the recommended recipe
    python examples/train_lm.py --data notes --pattern "*.md" --router switch --amp --accumulate 4
    torchrun --nproc-per-node 4 examples/train_lm.py      # experts spread over four processes
    python examples/train_lm.py --resume                  # goes on from out/train_lm, to the same losses

Writes to `--out`: `log.jsonl` (losses, telemetry), `checkpoint-<step>`, TensorBoard's files where that is installed.
"""

import argparse
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import equipoise as eq

VOCABULARY = 256  # bytes
FILES = 20  # one of so many is for validation


def read_text(folder: Path, pattern: str) -> tuple[Tensor, Tensor]:
    """Reads all files below a folder as bytes; every twentieth file is for validation."""
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing there"
        raise ValueError(
            f"data must be a folder, got {folder}, {what}: of a large file, make a folder with at least {FILES} "
            "parts of it (split -n 40 text.txt notes/part-), and give --data notes --pattern 'part-*'"
        )
    files = sorted(path for path in folder.rglob(pattern) if path.is_file() and "site-packages" not in path.parts)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % FILES == FILES - 1].append(path.read_bytes())
    if not parts[1]:
        raise ValueError(
            f"data must hold at least {FILES} files that match {pattern!r}, got {len(files)} in {folder}: give a "
            "folder with more of them, or another --pattern, or cut a large file into parts (split -n 40 text.txt "
            "notes/part-)"
        )
    train, validation = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


class Block(nn.Module):
    """Causal attention, then experts, each beside a residual connection."""

    def __init__(self, dim: int, heads: int, moe: eq.nn.MoE) -> None:
        """Puts the layers together."""
        super().__init__()
        self.heads = heads
        self.attention_norm, self.moe_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.moe = moe

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Maps [batch, positions, dim] to the same shape."""
        batch, positions, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, positions, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, positions, dim))
        return x + self.moe(self.moe_norm(x), token_ids=token_ids)


class Transformer(nn.Module):
    """Bytes in, logits for the next byte out."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Builds the model of the command's options."""
        super().__init__()
        self.context, self.prior_bytes = args.context, args.prior_bytes
        self.embedding = nn.Embedding(VOCABULARY, args.dim)
        self.positions = nn.Parameter(0.02 * torch.randn(args.context, args.dim))
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, make_moe(args, i)) for i in range(args.blocks))
        self.norm, self.head = nn.RMSNorm(args.dim), nn.Linear(args.dim, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.05)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Maps [batch, positions] to [batch, positions, 256]."""
        x = self.embedding(token_ids) + self.positions[: token_ids.shape[1]]
        router_ids, before = token_ids, token_ids  # what hashes and token priors look at: the last bytes
        for place in range(1, self.prior_bytes):
            before = F.pad(before, (1, 0))[:, :-1]
            router_ids = router_ids + before * VOCABULARY**place
        for block in self.blocks:
            x = block(x, router_ids)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: str, length: int, temperature: float = 0.8) -> str:
        """Continues a text, one byte at a time."""
        device, generator = self.head.weight.device, torch.Generator().manual_seed(0)
        written = list(prompt.encode()) or [10]
        for _ in range(length):
            logits = self(torch.tensor([written[-self.context :]], device=device))[0, -1].float().cpu()
            written.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
        return bytes(written).decode(errors="replace")


def make_moe(args: argparse.Namespace, block: int) -> eq.nn.MoE:
    """Makes the experts of one block, with the recipe of docs/language-models.md."""
    options: dict[str, Any] = {} if args.top_k == 1 else {"top_k": args.top_k}
    strength = args.token_prior if args.token_prior is not None else 10.0 if args.router in eq.STRATEGIES else 3.0
    if args.router == "hash":
        options["seed"] = block  # a hash of its own for each block, as the priors have
    elif strength > 0:
        options["token_prior"] = eq.nn.TokenPrior(VOCABULARY**args.prior_bytes, strength, seed=block)
    return eq.nn.MoE(args.dim, args.experts, router=args.router, capacity_factor=args.capacity_factor, **options)


class Training:
    """Model, surrogate, optimiser and step: what a checkpoint holds."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Builds everything from the options and the seed."""
        torch.manual_seed(args.seed)
        self.args, self.step, self.device = args, 0, torch.device(args.device)
        self.model = Transformer(args).to(self.device)
        self.rank, self.ranks, self.mesh = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), None
        if self.ranks > 1:  # started by torchrun: experts are spread over processes
            dist.init_process_group()
            sizes = (self.ranks // (args.expert_ranks or self.ranks), args.expert_ranks or self.ranks)
            self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("data", "expert"))
            eq.distributed.parallelize(self.model, self.mesh, scope=args.scope)
        self.surrogate = eq.nn.Surrogate(eq.nn.Readouts(self.model, VOCABULARY)).to(self.device)
        groups = eq.nn.parameter_groups(self.model, lr=args.lr, surrogate=self.surrogate)
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.trained = nn.ModuleDict({"model": self.model, "surrogate": self.surrogate})
        self.state = eq.distributed.TrainingState(self.trained, self.optimizer, schedule=self.schedule)

    def _rate(self, step: int) -> float:
        """A linear warm-up, then a cosine down to a tenth."""
        warm = min(1.0, (step + 1) / self.args.warmup)
        return warm * (0.55 + 0.45 * math.cos(math.pi * min(step / self.args.steps, 1.0)))

    def _batch(self, text: Tensor, seed: int) -> list[Tensor]:
        """Cuts random pieces out of the text. They are a function of the seed, so that a resumed run sees the same."""
        generator, context = torch.Generator().manual_seed(seed * self.ranks + self.rank), self.args.context
        starts = torch.randint(len(text) - context, [self.args.batch, 1], generator=generator)
        pieces = text[starts + torch.arange(context + 1)].long().to(self.device)
        return [pieces[:, :-1], pieces[:, 1:]]

    def _token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.amp):
            logits = self.model(ids)
        return F.cross_entropy(logits.float().mT, targets, reduction="none")

    def train_step(self, text: Tensor) -> tuple[float, Any]:
        """One step of the optimiser on `accumulate` batches; returns the mean loss and the last batch's routings."""
        args, total = self.args, 0.0
        for part in range(args.accumulate):
            ids, targets = self._batch(text, (args.seed * args.steps + self.step) * args.accumulate + part)
            with eq.nn.capture(self.model, self.optimizer, inputs=True) as routings:
                losses = self._token_losses(ids, targets)
            # The losses of the tokens, what trains the routers, and balance losses, in one scalar.
            loss = self.surrogate(losses, routings, targets=targets)
            (loss / args.accumulate).backward()
            total += losses.detach().mean().item() / args.accumulate
        if self.mesh is not None:
            eq.distributed.average_gradients(self.trained.parameters(), self.mesh)
        eq.distributed.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()  # the capture updates what routers keep, such as prices and biases, after this
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        return total, routings

    @torch.no_grad()
    def evaluate(self, text: Tensor, batches: int = 8) -> tuple[float, dict[str, Any]]:
        """The loss on the same pieces of the validation text at every call, and the routing of the last of them."""
        model, total = self.model.eval(), 0.0
        for number in range(batches):
            ids, targets = self._batch(text, number)
            with eq.nn.capture(model) as routings:
                total += self._token_losses(ids, targets).mean().item() / batches
        self.model.train()
        return total, routings.stats()


class Log:
    """A line of JSON for each record, and the same numbers for TensorBoard where it is installed."""

    def __init__(self, folder: Path, step: int) -> None:
        """Keeps what an earlier run logged up to the step from which this one goes on."""
        self.path = folder / "log.jsonl"
        old = self.path.read_text().splitlines() if step > 0 and self.path.exists() else []
        self.path.write_text("".join(f"{line}\n" for line in old if json.loads(line)["step"] <= step))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.board = None
        else:
            self.board = SummaryWriter(folder, purge_step=step + 1)

    def write(self, step: int, **record: Any) -> None:
        """Adds a record; nested numbers are named by their path, such as "layers/blocks.0.moe/max_violation"."""
        with self.path.open("a") as lines:
            lines.write(json.dumps({"step": step, **record}) + "\n")
        if self.board is not None:
            for name, value in _flatten(record):
                self.board.add_scalar(name, value, step)
            self.board.flush()


def _flatten(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def make_progress(step: int, steps: int) -> Callable[[int, str | None], None]:
    """A bar where tqdm is installed, else a line whenever there are new figures."""
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda step, text: None if text is None else print(f"step {step:,} of {steps:,}: {text}", flush=True)
    bar = tqdm(total=steps, initial=step, unit="step", smoothing=0.1)

    def show(step: int, text: str | None) -> None:
        bar.update(step - bar.n)
        if text is not None:
            bar.set_postfix_str(text)

    return show


def last_checkpoint(folder: Path) -> int:
    """Finds the last step with a whole checkpoint."""
    steps = [int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoint-*/.metadata")]
    if not steps:
        raise ValueError(
            f"out must hold a checkpoint to resume from, got {folder} without a whole checkpoint-<step>: leave out "
            "--resume to start anew, or give the --out of the run that is to go on"
        )
    return max(steps)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the options."""
    how = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=how)
    add, stdlib = parser.add_argument, Path(sysconfig.get_paths()["stdlib"])
    add("--data", type=Path, default=stdlib, help=f"folder of at least {FILES} files of text, with all below it")
    add("--pattern", default="*.py", help="which files of it")
    add("--out", type=Path, default=Path("out/train_lm"), help="folder for checkpoint and logs")
    add("--resume", action="store_true", help="go on from the checkpoint in --out; give the same options again")
    add("--router", default="skip-iw", choices=sorted(eq.nn.ROUTERS), help="how tokens find their experts")
    add("--experts", type=int, default=8, help="experts of each block")
    add("--top-k", type=int, default=1, help="experts of each token")
    add("--capacity-factor", type=float, default=1.25, help="in training an expert takes this times its share at most")
    add("--token-prior", type=float, help="strength; 0: none; by default 10 for routers that sample, else 3")
    add("--prior-bytes", type=int, default=2, help="how many bytes hashes and token priors look at")
    for name, default in (("dim", 128), ("heads", 4), ("blocks", 4), ("context", 128)):
        add(f"--{name}", type=int, default=default, help="of the model")
    add("--batch", type=int, default=16, help="sequences of a batch")
    add("--accumulate", type=int, default=1, help="batches of a step; an expert's capacity is that of one batch")
    add("--steps", type=int, default=2000, help="of the optimiser")
    add("--lr", type=float, default=2e-3, help="the largest learning rate")
    add("--warmup", type=int, default=100, help="steps until the learning rate is reached")
    add("--expert-ranks", type=int, help="processes that share one set of experts; by default all of them")
    add("--scope", default="local", choices=("local", "global"), help="of processes: whose tokens share a capacity")
    add("--amp", action="store_true", help="bfloat16 autocast; routers stay in float32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the model")
    add("--seed", type=int, default=0, help="of parameters, batches and noise")
    add("--log-every", type=int, default=50, help="steps between records of the training loss")
    add("--eval-every", type=int, default=500, help="steps between validations, each followed by a checkpoint")
    add("--prompt", default="def ", help="of the text that is generated at the end")
    add("--generate", type=int, default=300, help="how many bytes to generate")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Trains, logs, saves, and writes some text."""
    args = parse(arguments)
    training, (train, validation) = Training(args), read_text(args.data, args.pattern)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        training.step = last_checkpoint(args.out)
        training.state.load(args.out / f"checkpoint-{training.step}")
    first = training.rank == 0  # of several processes, the one that prints and logs
    write = Log(args.out, training.step).write if first else lambda *_, **__: None
    show = make_progress(training.step, args.steps) if first else lambda *_: None
    began, validated = time.perf_counter(), ""
    while training.step < args.steps:
        loss, routings = training.train_step(train)
        step, text = training.step, f"loss {loss:.3f}"
        logs, evaluates = step % args.log_every == 0 or step == 1, step % args.eval_every == 0 or step == args.steps
        if logs:
            seconds, began = time.perf_counter() - began, time.perf_counter()
            write(step, loss=loss, seconds=seconds, layers=routings.stats())
        if evaluates:
            validation_loss, layers = training.evaluate(validation)
            write(step, validation={"loss": validation_loss, "layers": layers})
            training.state.save(args.out / f"checkpoint-{step}")
            validated = f", validation {validation_loss:.3f}"
        show(step, text + validated if logs or evaluates else None)
    text = training.model.eval().generate(args.prompt, args.generate)  # by all processes: they share the experts
    if first:
        print("\n" + text)
    if training.mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
