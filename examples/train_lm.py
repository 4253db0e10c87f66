# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level transformer with mixtures of experts on a folder of text, with any router of equipoise.

    python examples/train_lm.py                           # the standard library's sources, the recommended recipe
    python examples/train_lm.py --data notes --pattern "*.md" --router switch --amp --accumulate 4
    python examples/train_lm.py --resume                  # goes on from out/train_lm, to the same losses

Writes to `--out`: `log.jsonl` (losses, telemetry of every layer), `checkpoint.pt`, and TensorBoard's files where
tensorboard is installed. It needs equipoise and nothing else. Copy it, and change what you like.
"""

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq

VOCABULARY = 256  # bytes


# --- data ------------------------------------------------------------------------------------------------------------


def read_text(folder: Path, pattern: str) -> tuple[Tensor, Tensor]:
    """Reads all files below a folder as bytes; every twentieth file is for validation."""
    files = sorted(path for path in folder.rglob(pattern) if path.is_file() and "site-packages" not in path.parts)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % 20 == 19].append(path.read_bytes())
    if not parts[1]:
        raise ValueError(f"data must hold at least 20 files that match {pattern!r}, got {len(files)} in {folder}")
    train, validation = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


def draw_batch(text: Tensor, rows: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Cuts random pieces out of the text. A batch is a function of its seed, so that a resumed run sees the same."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, [rows, 1], generator=generator)
    pieces = text[starts + torch.arange(context + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


# --- model -----------------------------------------------------------------------------------------------------------


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
        self.context = args.context
        self.embedding = nn.Embedding(VOCABULARY, args.dim)
        self.positions = nn.Parameter(0.02 * torch.randn(args.context, args.dim))
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, make_moe(args)) for _ in range(args.blocks))
        self.norm, self.head = nn.RMSNorm(args.dim), nn.Linear(args.dim, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.05)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Maps [batch, positions] to [batch, positions, 256]."""
        x = self.embedding(token_ids) + self.positions[: token_ids.shape[1]]
        for block in self.blocks:
            x = block(x, token_ids)
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


def make_moe(args: argparse.Namespace) -> eq.nn.MoE:
    """Makes the experts of one block. Options that a router has no use for are errors, so only some are passed on."""
    options: dict[str, Any] = {} if args.top_k == 1 else {"top_k": args.top_k}
    return eq.nn.MoE(args.dim, args.experts, router=args.router, capacity_factor=args.capacity_factor, **options)


# --- training --------------------------------------------------------------------------------------------------------


class Training:
    """Model, surrogate, optimiser and step: what a checkpoint holds."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Builds everything from the options and the seed."""
        torch.manual_seed(args.seed)
        self.args, self.step = args, 0
        self.device = torch.device(args.device)
        self.model = Transformer(args).to(self.device)
        # Several processes: make a mesh and shard the model here; give every process its own part of each batch.
        self.surrogate = eq.nn.Surrogate()
        groups = eq.nn.parameter_groups(self.model, lr=args.lr, router_lr_scale=args.router_lr_scale)
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)

    def _rate(self, step: int) -> float:
        """A linear warm-up, then a cosine down to a tenth."""
        warm = min(1.0, (step + 1) / self.args.warmup)
        return warm * (0.55 + 0.45 * math.cos(math.pi * min(step / self.args.steps, 1.0)))

    def _token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.amp):
            logits = self.model(ids.to(self.device))
        return F.cross_entropy(logits.float().mT, targets.to(self.device), reduction="none")

    def train_step(self, text: Tensor) -> tuple[float, Any]:
        """One step of the optimiser on `accumulate` batches; returns the mean loss and the last batch's routings."""
        args, total, captured = self.args, 0.0, []
        for part in range(args.accumulate):
            seed = (args.seed * args.steps + self.step) * args.accumulate + part
            ids, targets = draw_batch(text, args.batch, args.context, seed)
            with eq.nn.capture(self.model) as routings:
                losses = self._token_losses(ids, targets)
            loss = self.surrogate(losses, routings)  # the loss of the tokens, what trains the routers, balance losses
            (loss / args.accumulate).backward()
            total += losses.detach().mean().item() / args.accumulate
            captured.append(routings)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for routings in captured:
            routings.update()  # averages, biases and prices that routers keep
        self.schedule.step()
        self.step += 1
        return total, captured[-1]

    @torch.no_grad()
    def evaluate(self, text: Tensor, batches: int = 8) -> tuple[float, dict[str, Any]]:
        """The loss on the same pieces of the validation text at every call, and the routing of the last of them."""
        self.model.eval()
        total = 0.0
        for number in range(batches):
            ids, targets = draw_batch(text, self.args.batch, self.args.context, number)
            with eq.nn.capture(self.model) as routings:
                total += self._token_losses(ids, targets).mean().item() / batches
        self.model.train()
        return total, routings.stats()

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "surrogate", "optimizer", "schedule")}
        return {**parts, "step": self.step, "noise": torch.get_rng_state(), "device_noise": _device_noise(self.device)}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        for name in ("model", "surrogate", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        self.step = state["step"]
        torch.set_rng_state(state["noise"])
        if state["device_noise"] is not None:
            torch.get_device_module(self.device).set_rng_state(state["device_noise"])


def _device_noise(device: torch.device) -> Tensor | None:
    """The state of an accelerator's random stream, from which routers on it draw."""
    return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()


# --- logs ------------------------------------------------------------------------------------------------------------


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


class Progress:
    """A bar where tqdm is installed, else a line whenever something is logged."""

    def __init__(self, step: int, steps: int) -> None:
        """Starts at a step."""
        try:
            from tqdm import tqdm
        except ImportError:
            self.bar, self.steps = None, steps
        else:
            self.bar = tqdm(total=steps, initial=step, unit="step", smoothing=0.1)

    def show(self, step: int, text: str | None) -> None:
        """Moves to a step, with the newest figures if there are any."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            if text is not None:
                self.bar.set_postfix_str(text)
        elif text is not None:
            print(f"step {step:,} of {self.steps:,}: {text}", flush=True)


# --- command ---------------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    add = parser.add_argument
    add("--data", type=Path, default=stdlib, help="folder of text; read with all folders below it")
    add("--pattern", default="*.py", help="which files of it")
    add("--out", type=Path, default=Path("out/train_lm"), help="folder for checkpoint and logs")
    add("--resume", action="store_true", help="go on from the checkpoint in --out; give the same options again")
    add("--router", default="skip-iw", choices=sorted(eq.nn.ROUTERS), help="how tokens find their experts")
    add("--experts", type=int, default=8, help="experts of each block")
    add("--top-k", type=int, default=1, help="experts of each token")
    add("--capacity-factor", type=float, default=1.25, help="in training an expert takes this times its share at most")
    add("--router-lr-scale", type=float, default=1.0, help="the routers' learning rate in units of --lr")
    for name, default in (("dim", 128), ("heads", 4), ("blocks", 4), ("context", 128)):
        add(f"--{name}", type=int, default=default, help="of the model")
    add("--batch", type=int, default=16, help="sequences of a batch")
    add("--accumulate", type=int, default=1, help="batches of a step; an expert's capacity is that of one batch")
    add("--steps", type=int, default=2000, help="of the optimiser")
    add("--lr", type=float, default=2e-3, help="the largest learning rate")
    add("--warmup", type=int, default=100, help="steps until the learning rate is reached")
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
    train, validation = read_text(args.data, args.pattern)
    training, checkpoint = Training(args), args.out / "checkpoint.pt"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        training.load(torch.load(checkpoint))
    log, progress, began = Log(args.out, training.step), Progress(training.step, args.steps), time.perf_counter()
    shown = ""
    while training.step < args.steps:
        loss, routings = training.train_step(train)
        step, text = training.step, None
        if step % args.log_every == 0 or step == 1:
            seconds, began = time.perf_counter() - began, time.perf_counter()
            log.write(step, loss=loss, seconds=seconds, layers=routings.stats())
            text = f"loss {loss:.3f}{shown}"
        if step % args.eval_every == 0 or step == args.steps:
            validated, layers = training.evaluate(validation)
            log.write(step, validation={"loss": validated, "layers": layers})
            torch.save(training.state(), checkpoint)
            shown = f", validation {validated:.3f}"
            text = f"loss {loss:.3f}{shown}"
        progress.show(step, text)
    training.model.eval()
    print("\n" + training.model.generate(args.prompt, args.generate))


if __name__ == "__main__":
    main()
