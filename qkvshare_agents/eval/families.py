"""Tiny random models of the families that people run, and what can be handed over in each."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import doctor
from qkvshare_agents.model.engine import Engine

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SIZES: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.12,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 640, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 4096, "initializer_range": 0.12,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_WINDOW = {"sliding_window": 24}
_DELTA_NET = {
    "head_dim": 16, "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
_INDEXED = {**_LATENT, "q_lora_rank": 24, "index_topk": 24, "index_n_heads": 16, "index_head_dim": 16}
# Granite's default is 1, with which softmax is 3.5 times as sharp as elsewhere
_ATTENTION_AS_USUAL = {"attention_multiplier": 12**-0.5}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Layers with a window and without differ in heads and head size, and the last ones use the KV of earlier ones.
_SHARING = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 640, "hidden_size_per_layer_input": 8,
}  # fmt: skip

_ROTARY_GPT = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 4096, "n_inner": 64, "rotary_dim": 8}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}

# What differs from _SIZES, by transformers' model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 16}, "mistral": _WINDOW, "gpt2": _GPT2, "gpt_neox": {},
    "phi": {"num_key_value_heads": 4}, "phi3": {"sliding_window": None}, "falcon": {},
    "bloom": {"n_layer": 3, "n_head": 4}, "opt": {"word_embed_proj_dim": 48, "ffn_dim": 64}, "starcoder2": _WINDOW,
    "stablelm": {"hidden_size": 64}, "mpt": {"d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 4096},
    "arcee": {}, "ernie4_5": {"head_dim": 16}, "seed_oss": {"head_dim": 16}, "hunyuan_v1_dense": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "granite": _ATTENTION_AS_USUAL,
    "cohere": {}, "cohere2": _WINDOW, "olmo2": {}, "olmo3": _WINDOW, "glm": {"head_dim": 12},
    "glm4": {"head_dim": 12}, "exaone4": {**_WINDOW, "num_hidden_layers": 4}, "gemma": {"head_dim": 16},
    "gemma2": {**_WINDOW, "head_dim": 16}, "gemma3_text": {**_WINDOW, "head_dim": 16},
    "gemma3n_text": {
        **_WINDOW, **_SHARING, "head_dim": 16, "laurel_rank": 8, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {**_WINDOW, **_SHARING, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
    "ministral": {**_WINDOW, "head_dim": 16},
    "llama4_text": {
        "attention_chunk_size": 24, "head_dim": 16, "num_local_experts": 2, "num_hidden_layers": 4,
        "intermediate_size_mlp": 64,
    },
    "gpt_oss": {**_WINDOW, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4},
    "mixtral": {"num_local_experts": 4}, "qwen2_moe": _EXPERTS, "qwen3_moe": {**_EXPERTS, "head_dim": 16},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, "glm4_moe_lite": _LATENT,
    "deepseek_v3": _LATENT, "deepseek_v2": {**_LATENT, "n_group": None, "topk_group": None},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16}, "qwen3_5_text": _DELTA_NET,
    "olmo_hybrid": {"num_hidden_layers": 4},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "mamba": {"state_size": 8}, "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2},
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
        "head_dim": 12,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 16,
        "mamba_ngroups": 1, "n_mamba_heads": 2, "num_mem_blocks": 2, "attention_head_dim": 24,
    },
    "granitemoehybrid": {
        **_MAMBA2, **_ATTENTION_AS_USUAL, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2,
        "num_experts_per_tok": 1, "shared_intermediate_size": 32,
    },
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
        "expert_layer_period": 2, "num_experts": 2, "use_mamba_kernels": False,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 6, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 1, "head_dim": 12,
    },
    "gptj": _ROTARY_GPT, "codegen": _ROTARY_GPT, "gpt_bigcode": {}, "persimmon": {}, "nemotron": {},
    "helium": {"head_dim": 12}, "apertus": {}, "bitnet": {}, "internlm3": {}, "diffllama": {}, "olmo": {},
    "nanochat": {}, "ministral3": {"head_dim": 16}, "cwm": {**_WINDOW, "head_dim": 12, "num_hidden_layers": 4},
    "vaultgemma": {**_WINDOW, "head_dim": 16}, "olmoe": _EXPERTS, "flex_olmo": _EXPERTS,
    "phimoe": {"num_local_experts": 4}, "granitemoe": {**_ATTENTION_AS_USUAL, "num_local_experts": 4},
    "granitemoeshared": {**_ATTENTION_AS_USUAL, "num_local_experts": 4, "shared_intermediate_size": 32},
    "jetmoe": {"kv_channels": 12, "num_key_value_heads": 4, "num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "glm4_moe": {**_ROUTED, "first_k_dense_replace": 1, "head_dim": 12},
    "dots1": {**_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 12},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {**_EXPERTS, "head_dim": 16},
    "exaone_moe": {**_EXPERTS, **_WINDOW, "head_dim": 16, "num_hidden_layers": 4},
    "mimo_v2_flash": {**_WINDOW, **_ROUTED, "head_dim": 16, "v_head_dim": 12},
    "longcat_flash": {
        **_LATENT, "q_lora_rank": 24, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16,
        "moe_topk": 2, "zero_expert_num": 2, "head_dim": 8,
    },
    "deepseek_v32": _INDEXED, "glm_moe_dsa": {**_INDEXED, "index_topk_freq": 2, "num_hidden_layers": 4},
    "qwen4_exp_text": {
        **_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8,
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 24,
        "indexer_compress_ratio": 4,
    },
    "deepseek_v4": {
        **_WINDOW, **_ROUTED, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 24, "o_lora_rank": 8,
        "o_groups": 2, "qk_rope_head_dim": 8, "index_topk": 8, "index_n_heads": 8, "index_head_dim": 16,
        "compress_rates": {"heavily_compressed_attention": 16, "compressed_sparse_attention": 4},
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "num_local_experts": 4,
    },
    "kimi_linear": {
        **_LATENT, "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4, "q_lora_rank": 24,
        "linear_attn_config": {
            "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
        },
    },
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "lfm2_moe": {
        **_EXPERTS, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1,
    },
    "lfm3": {"num_hidden_layers": 4}, "zaya": {},
    "minimax": {}, "rwkv": {}, "xlstm": {"num_heads": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 24, "head_dim": 12},
}  # fmt: skip
COLUMNS = ("exact", "reading", "cut", "fork", "fitting", "splice", "8", "4", "3", "3/2")
_PRESET_OF = {"8": "safe", "4": "compact", "3": "small", "3/2": "tiny"}


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model of a family, small but with logits that differ."""
    torch.manual_seed(seed)
    sizes = {} if family == "gpt2" else _SIZES
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES.get(family, {}), **overrides})
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()


def matrix(families: Iterable[str] = tuple(FAMILIES)) -> dict[str, dict[str, Any]]:
    """Of every family: what `doctor.examine` found. Raises InvalidSetting for an unknown family."""
    unknown = sorted(set(families) - FAMILIES.keys())
    if unknown:
        raise InvalidSetting(f"no family {', '.join(unknown)}; the families are {', '.join(FAMILIES)}")
    tokenizer = _tokenizer()
    return {name: doctor.examine(Engine.of(tiny_model(name), tokenizer, name=f"tiny-{name}")) for name in families}


def cells(found: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table. A width is good when it leaves less than a tenth of what no context at all costs."""
    if found["refusal"]:
        return {"exact": "text", **dict.fromkeys(COLUMNS[1:], "")}
    limit = found["kl"]["no context"] / 10
    return {
        "exact": "yes" if doctor.is_exact(dict(found)) else "no",
        "reading": found["reading"],
        "cut": "any token" if found["cut"] else "turn ends",
        "fork": "yes" if found["fork"] else "no",
        "fitting": "text" if found["immovable"] else "KV",
        "splice": "yes" if found["kl"].get("spliced", limit) < limit and not found["immovable"] else "no",
        **{column: "yes" if found["kl"][preset] < limit else "no" for column, preset in _PRESET_OF.items()},
    }


def markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table in the README."""
    lines = ["| family | layers | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, row in found.items():
        kinds = " + ".join(row["layers"]) + (" (window)" if row["window"] else "")
        lines.append(f"| {name} | {kinds} | " + " | ".join(cells(row)[column] for column in COLUMNS) + " |")
    return "\n".join(lines)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and three control tokens: as much of a tokenizer as an engine needs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = _CHATML
    return tokenizer
