"""Small models, tokenizers and templates that the tests share."""

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.model.engine import Engine

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = [
    "def add(a, b):\n    return a + b\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    "system user assistant [coder] You write Python. [tester] You write tests for the code above. TERMINATE",
    "The quick brown fox jumps over the lazy dog. Several agents work on this conversation in turn.",
    '{"name": "lookup", "arguments": {"city": "Paris"}} <tool_call> </tool_call> <tool_response>',
] * 4


def stacked(keys: torch.Tensor, values: torch.Tensor) -> Span:
    """A span of layers that are all alike: keys [L, H, T, Dk] and values [L, H, T, Dv]."""
    return Span(keys.shape[2], (Block(tuple(range(len(keys))), keys, values),))


def tiny_tokenizer(
    template: str = CHATML, special: list[str] = SPECIAL, eos: str = "<|im_end|>"
) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on a few lines in milliseconds."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(kind: str = "llama", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random float32 model of a family, small but with logits that differ (initializer 0.12)."""
    torch.manual_seed(seed)
    sizes: dict[str, object] = {
        "vocab_size": 640, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "initializer_range": 0.12, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "gpt2":
        sizes = {
            "vocab_size": 640, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 4096,
            "initializer_range": 0.12, "bos_token_id": 0, "eos_token_id": 2,
        }  # fmt: skip
    if kind == "mistral":
        sizes["sliding_window"] = None
    config = AutoConfig.for_model(kind, **{**sizes, **overrides})
    return AutoModelForCausalLM.from_config(config).eval()


def of_words(model: PreTrainedModel) -> PreTrainedModel:
    """The model, which now hardly ever generates what is no word of `tiny_tokenizer`: control tokens but the one that
    ends a turn, single bytes, ids that stand for nothing. Answers of these are not handed over as they came."""
    end, words = 2, range(len(SPECIAL) + 256, len(tiny_tokenizer()))
    head = model.get_output_embeddings()
    weight = head.weight.detach().clone()  # embeddings may be tied to it
    weight[[i for i in range(len(weight)) if i not in words and i != end]] = 0
    head.weight = torch.nn.Parameter(weight)
    return model


def tiny_engine(kind: str = "llama", seed: int = 0, template: str = CHATML, **overrides: object) -> Engine:
    return Engine.of(tiny_model(kind, seed, **overrides), tiny_tokenizer(template), name=f"tiny-{kind}-{seed}")
