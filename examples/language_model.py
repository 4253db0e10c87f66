# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # A language model and its telemetry
#
# `examples/train_lm.py` trains a byte-level transformer with experts on any folder of text, in one file that you can
# copy. This page runs it in small on the sources of Python's standard library, and reads what it logs.
#
# ```
# python examples/train_lm.py --router skip-iw
# ```

# %%
import contextlib  # hidden
import json  # hidden
import sys  # hidden
import tempfile  # hidden
from pathlib import Path  # hidden

import matplotlib.pyplot as plt  # hidden

sys.path.insert(0, "examples")  # hidden
import train_lm

STEPS = 200
out = Path(tempfile.mkdtemp())  # hidden


def train(router: str, *more: str) -> list[dict]:
    """Runs the example with a router, and returns the records of its log."""
    small = ["--dim", "64", "--heads", "2", "--blocks", "2", "--context", "64", "--lr", "4e-3", "--generate", "0"]
    often = ["--steps", str(STEPS), "--warmup", "20", "--log-every", "10", "--eval-every", str(STEPS)]
    with contextlib.redirect_stdout(None):  # the text that it writes at the end
        train_lm.main(["--router", router, "--out", str(out / router), *small, *often, *more])
    return [json.loads(line) for line in (out / router / "log.jsonl").read_text().splitlines()]


logs = {router: train(router) for router in ("switch", "skip-iw", "gm-iw-mix")}

# %% [markdown]
# ## What was logged
#
# Every record has the loss and, for each layer by name, what its router did. The last one of `skip-iw`, first layer:

# %%
record = [line for line in logs["skip-iw"] if "layers" in line][-1]
for name, value in record["layers"]["blocks.0.moe"].items():
    print(f"{name:24}", [round(x) for x in value] if isinstance(value, list) else round(value, 3))

# %% [markdown]
# [Read telemetry, and fix what it shows](../how-to/telemetry.md) explains each number, and what to do when one is
# bad.
#
# ## Three routers side by side

# %%
LOOKS = {"switch": ("#6b6b6b", ":"), "skip-iw": ("#0b4f94", "-"), "gm-iw-mix": ("#8c2d04", "--")}
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 3.0), layout="constrained")
figure.set_label("Loss, imbalance and dropped tokens while three routers train")
for router, log in logs.items():
    colour, dashes = LOOKS[router]
    steps = [line["step"] for line in log if "layers" in line]
    layer = [line["layers"]["blocks.0.moe"] for line in log if "layers" in line]
    style = {"color": colour, "linestyle": dashes, "label": router}
    left.plot(steps, [line["loss"] for line in log if "layers" in line], **style)
    middle.plot(steps, [stats["max_violation"] for stats in layer], **style)
    right.plot(steps, [100 * stats["fraction_dropped"] for stats in layer], **style)
left.set(xlabel="step", ylabel="training loss (nats a byte)", title="loss")
middle.set(xlabel="step", ylabel="MaxVio", title="largest load over the mean, less 1")
right.set(xlabel="step", ylabel="tokens dropped (%)", title="dropped")
left.legend()
for router, log in logs.items():
    print(f"{router:10} validation loss {log[-1]['validation']['loss']:.3f} nats a byte")

# %% [markdown]
# `gm-iw-mix` stays within its slack and drops nothing. `skip-iw` and `switch` stay within the capacity by dropping
# tokens, here more than the 5% that are healthy: the prior's hash is not balanced on this text, and 200 steps are too
# few for the routers to change that. Runs this short say nothing about which one is best: [language
# models](../language-models.md) compares them over five seeds, each tuned alike.
#
# ## Interrupt it
#
# The example saves model, surrogate, optimiser and random state after each validation. `--resume` goes on to the same
# losses. See [checkpoint and resume](../how-to/checkpoint.md).
