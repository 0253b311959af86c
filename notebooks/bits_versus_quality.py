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
# # Bits versus quality
#
# How far does the next-token distribution move when the cache behind it is stored with fewer bits, and how many bytes
# does that save? Every point is a way to store keys and values, ours and others', measured on the same texts in the
# same run: mean KL to the native cache over forced continuation of real text, bytes of all tensors that are kept.
#
# The results in `results/` come from `qkvshare eval fidelity --json`; their headers say on what they were measured.
# With `QKVSHARE_REDUCED=1` this notebook measures a few positions itself instead.

# %%
import io
import json
import os
from pathlib import Path

from IPython.display import Image, display

from qkvshare_agents.eval import cases, fidelity, plot, table
from qkvshare_agents.kv.page import PRESETS, RENAMED

if os.environ.get("QKVSHARE_REDUCED"):
    plan = cases.Plan(tokens=192, samples=2, positions=16, repeat_positions=16, needles=(), problems=0)
    results = [fidelity.run(model="smollm2-135m", plan=plan)]
else:
    here = Path.cwd() if Path("results").is_dir() else Path("notebooks")
    results = [
        json.loads(path.read_text()) for path in sorted((here / "results").glob("fidelity-*.json"), reverse=True)
    ]
for result in results:
    print({key: result["header"][key] for key in ("model", "tokens", "positions", "date", "versions")})

# %% [markdown]
# ## All measures
#
# KL while *repeating* the stored text separates schemes better than while continuing it: every token is looked up.
# The two controls show how far one can fall: without any context, and behind another text's cache.

# %%
for result in results:
    table.show(result)

# %% [markdown]
# ## The frontier
#
# The dashed line joins what nothing else beats in both bytes and KL.

# %%
for result in results:
    picture = io.BytesIO()
    plot.picture(result).savefig(picture, format="png", dpi=100)
    display(Image(picture.getvalue()))

# %% [markdown]
# ## Keys or values?
#
# Taking a bit from the keys costs more than taking it from the values, on both models: a wrong key sends attention to
# the wrong tokens, a wrong value is averaged over many.

# %%
named = {(p.key_bits, p.value_bits): name for name, p in PRESETS.items()}
widths = [(k, v) for k in (8, 4, 3, 2) for v in (8, 4, 3, 2) if v <= k]
for result in results:
    rows = {RENAMED.get(row["scheme"], row["scheme"]): row for row in result["rows"]}  # also of older results
    print(result["header"]["model"])
    for k, v in widths:
        row = rows[named.get((k, v), f"k{k}v{v}")]
        print(f"  keys {k}, values {v}: {row['packed_bits_per_value']:.2f} bits, KL {row['mean_kl']:.1e}")
