# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What happens to one conversation
#
# A coder writes a function, a tester reads it. Both are the same local model, so the tester can continue from the
# coder's KV cache instead of reading the conversation again. This notebook follows the tokens, the pages that hold
# their keys and values, and the error that quantizing them leaves in the attention.

# %%
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from transformers.utils import logging

from qkvshare_agents.host.host import Host
from qkvshare_agents.kv.page import PRESETS, seal
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.key_calibration import settle
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.report import table
from qkvshare_agents.turns.request import Turn
from qkvshare_kernels import reference

logging.disable_progress_bar()
# `eager` attention returns its weights, which the last part needs
engine = Engine.load("smollm2-135m", dtype="float32", attn_implementation="eager")
print(engine.shape)

# %% [markdown]
# ## One transcript for both
#
# A framework gives every agent its own system message first, so two agents' prompts part after a few tokens. Here
# both read the same transcript; a *cue* at the end of a user turn says who answers next and carries its instruction.

# %%
host = Host(HostSettings("smollm2-135m", precision="safe", measure_replay=True), engine)
coder = host.roster.learn("team", "coder", "Write the function, with a short docstring and nothing else.")
tester = host.roster.learn("team", "tester", "Now write a test for this function with three asserts.")
task = Message("user", "Write a Python function is_even(n) that returns True if n is even.")


def answer(member: Member, *messages: Message) -> str:
    turn = Turn(member, "team", messages, Sampling(max_tokens=100))
    return host.submit(turn).result().text


code = answer(coder, task)
print(code)

# %%
said = Message("assistant", code, "coder")
test = answer(tester, task, said)
print(test)

# %% [markdown]
# The tester's prompt, as the model sees it. Everything above its cue is what the coder's turn has computed.

# %%
prompt = host.prompt(Turn(tester, "team", (task, said)))
report = host.reports[-1]
shared, own = prompt.ids[: report.reused_tokens], prompt.ids[report.reused_tokens :]
print(engine.tokenizer.decode(shared))
print("-" * 40, f"{len(shared)} tokens handed over, {len(own)} to read")
print(engine.tokenizer.decode(own))

# %% [markdown]
# ## What it saved

# %%
Console(width=100).print(table(list(host.reports)))

# %% [markdown]
# ## The pages
#
# KV is stored in pages of 64 tokens. A full page is encoded once: the first four tokens of a conversation stay native
# (most attention goes there), the others become small integers. The page at the end is not full and stays native.

# %%
match = host.store.match(prompt.ids)
figure, axes = plt.subplots(figsize=(10, 1.9), layout="constrained")
start = 0
for (page, tokens), node in zip(match.runs, match.nodes, strict=True):
    native = max(part.native_tokens for part in page.keys)
    for left, width, colour in (
        (start, min(native, tokens), "tab:orange"),
        (start + native, tokens - native, "tab:blue"),
    ):
        if width > 0:
            axes.barh(0, width, left=left, color=colour, edgecolor="white")
    axes.text(
        start + tokens / 2, 0, f"{tokens} tokens\n{page.nbytes / 1e6:.2f} MB", ha="center", va="center", color="white"
    )
    axes.text(start + tokens / 2, -0.62, node.key.hex()[:8], ha="center", fontsize=8)
    start += tokens
axes.set(
    yticks=[], xlabel="token", xlim=(0, start), ylim=(-0.8, 0.5), title="blue: 8 bits; orange: native; below: address"
)
plt.show()

# %% [markdown]
# ## Why keys are rotated first
#
# Keys of one head, 64 tokens of a real page. Some channels have a large offset and range. A group is one channel of a
# page, so that the offset costs nothing; a rotation of the head dimension (Hadamard) then spreads what is left of the
# outliers. Whether that helps is a property of the model: it is probed once and written into every page.

# %%
LAYER, HEAD = 12, 1
long_prompt = (engine.template.head("", (), " ".join([task.text, code, test])) * 4)[:256]
kv = KVCache(engine.shape)
engine.feed(engine.begin(kv), long_prompt)
(block,) = kv.span(0, len(long_prompt)).blocks  # all layers are alike here, and stacked
keys, values = block.keys.clone(), block.values.clone()

rotation = reference.hadamard(keys.shape[-1], keys.device)
page_keys = keys[LAYER, HEAD, 64:128]
figure, both = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained", sharey=True)
for axes, shown, title in zip(both, (page_keys, page_keys @ rotation), ("keys", "rotated keys"), strict=True):
    picture = axes.imshow(shown, cmap="RdBu", vmin=-8, vmax=8, aspect="auto")
    axes.set(title=f"{title}: layer {LAYER}, head {HEAD}", xlabel="channel")
both[0].set_ylabel("token")
figure.colorbar(picture, ax=both)
plt.show()

# %% [markdown]
# ## The attention error
#
# The same question is read behind the native cache and behind pages of every preset. How far do the attention weights
# move (sum of absolute differences, of at most 2), per layer, on average over heads and the question's tokens?

# %%
question = engine.template.user("[tester] Which inputs are tested?") + engine.template.turn


@torch.inference_mode()
def attention(k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Weights [HQ, t, T] of every layer, for the question behind the keys and values."""
    kv = KVCache(engine.shape)
    kv.clear(k.shape[2] + len(question))
    for layer in range(engine.shape.layers):
        kv.append(layer, k[layer], v[layer])
    run = engine.begin(kv)
    positions = torch.arange(kv.tokens, kv.tokens + len(question))[None]
    output = engine.model(
        input_ids=torch.tensor([question]),
        position_ids=positions,
        output_attentions=True,
        **{engine.driver.cache_argument: run.cache},
    )
    return [weights[0] for weights in output.attentions]


def stored(preset: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as a reader gets them back."""
    precision, k, v = settle(PRESETS[preset], engine), keys.clone(), values.clone()
    span = Span(k.shape[2], (Block(block.layers, k, v),))
    for start in range(0, span.tokens, precision.page_size):
        part = span.cut(start, start + precision.page_size)
        seal(part, precision, starts_sequence=start == 0).open_into(part)
    return k, v


native = attention(keys, values)
figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
for preset in ("safe", "compact", "small", "tiny"):
    moved = [float((a - b).abs().sum(-1).mean()) for a, b in zip(attention(*stored(preset)), native, strict=True)]
    axes.plot(moved, marker=".", label=preset)
axes.set(xlabel="layer", ylabel="attention moved (of 2)", yscale="log", title="attention weights behind stored pages")
axes.legend()
plt.show()

# %%
host.close()
