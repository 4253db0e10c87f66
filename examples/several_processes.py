# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Experts on several processes
#
# Eight experts on two processes: each holds four of them, and tokens travel to their experts and back. The engine is
# torch.distributed; this page runs it on one machine with gloo, and the same code runs on many with another backend.
#
# A process is a function of its rank. `parallelize` shards the experts of every layer over the mesh's axis `expert`.

# %%
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import equipoise as eq

RANKS, STEPS = 2, 20


def build() -> torch.nn.Module:
    """Makes the same model in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(eq.nn.MoE(32, 8, router="gm-iw", capacity_factor=1.0))


def work(rank: int, scope: str, store: str, results) -> None:
    """Trains on this rank's part of each batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("expert",))
    model = build()
    eq.distributed.parallelize(model, mesh, scope=scope)
    surrogate = eq.nn.Surrogate()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    for _ in range(STEPS):
        x = torch.randn(128, 32, generator=generator) + rank  # ranks have different data
        with eq.nn.capture(model, optimizer) as routings:
            losses = (x + model(x) - 1).square().mean(-1)
        loss = surrogate(losses, routings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results.put((rank, scope, losses.mean().item(), routings[0].stats.load.tolist()))
    dist.destroy_process_group()


# %% [markdown]
# ## Local and global balance
#
# With `scope="local"` each rank balances its own tokens: every rank sends the same number of tokens to every other,
# so the exchange has static sizes. With `scope="global"` the assignment is exact over the tokens of *all* ranks: a
# rank whose tokens all prefer the same expert may send it more, if another rank sends it less.

# %%


def main() -> None:
    """Runs both scopes, one after the other."""
    context = torch.multiprocessing.get_context("fork")
    for scope in ("local", "global"):
        store, results = tempfile.mktemp(), context.SimpleQueue()
        processes = [context.Process(target=work, args=(rank, scope, store, results)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        for rank, _, loss, load in sorted(results.get() for _ in processes):
            print(f"{scope:6} rank {rank}: loss {loss:.3f}, tokens of each expert {load}")


main()

# %% [markdown]
# ## As people run it
#
# ```
# torchrun --nproc-per-node 4 examples/train_lm.py
# ```
#
# [On several machines](../distributed.md) has data parallelism beside it (FSDP2, DDP), checkpoints that load onto
# another number of ranks, what happens when a rank dies, and a calculator for what the exchange costs.
