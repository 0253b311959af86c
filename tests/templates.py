"""Small chat templates that behave like those of well-known model families, and tokenizers for them."""

import json
from dataclasses import dataclass

from support import CHATML, tiny_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CHATML_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a small model.<|im_end|>\n{% endif %}" + CHATML
)
LLAMA2 = """
{%- if messages[0].role == 'system' -%}
  {%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
  {%- if (m.role == 'user') != (loop.index0 is even) -%}
    {{- raise_exception('roles must alternate user/assistant') -}}
  {%- elif m.role == 'user' -%}{{- bos_token + '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' -}}
  {%- elif m.role == 'assistant' -%}{{- ' ' + m.content + ' ' + eos_token -}}{%- endif -%}
{%- endfor -%}"""
LLAMA3 = """
{{- bos_token -}}
{%- set day = date_string if date_string is defined else '26 Jul 2024' -%}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + day + ' ' + strftime_now('%d %f') + '\n\n' -}}
{{- system + '<|eot_id|>' -}}
{%- for m in rest -%}
  {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""
LLAMA31 = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' -}}
{%- if tools -%}{{- 'Environment: ipython\n' -}}{%- endif -%}
{{- system + '<|eot_id|>' -}}
{%- for m in rest -%}
  {%- if m.role == 'tool' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' -}}
  {%- elif m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}{{- raise_exception('only one tool call at once') -}}{%- endif -%}
    {%- set call = m.tool_calls[0].function -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' -}}
    {{- call.arguments | tojson + '}<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' -}}
    {%- if loop.first and tools -%}
      {{- 'Given these functions, answer with a call.\n\n' -}}
      {%- for t in tools -%}{{- t | tojson(indent=4) + '\n\n' -}}{%- endfor -%}
    {%- endif -%}
    {{- m.content | trim + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""
MISTRAL1 = """
{{- bos_token -}}
{%- for m in messages -%}
  {%- if (m.role == 'user') != (loop.index0 is even) -%}
    {{- raise_exception('roles must alternate user/assistant') -}}
  {%- elif m.role == 'user' -%}{{- '[INST] ' + m.content + ' [/INST]' -}}
  {%- elif m.role == 'assistant' -%}{{- m.content + eos_token -}}
  {%- else -%}{{- raise_exception('only user and assistant roles') -}}{%- endif -%}
{%- endfor -%}"""
MISTRAL3 = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content + '\n\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- set ns = namespace(turn=0, last=0) -%}
{%- for m in rest -%}
  {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
  {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
    {%- if (m.role == 'user') != (ns.turn is even) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
    {%- set ns.turn = ns.turn + 1 -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in rest -%}
  {%- if m.role == 'user' -%}
    {%- if tools and loop.index0 == ns.last -%}
      {{- '[AVAILABLE_TOOLS] [' -}}
      {%- for t in tools -%}{{- t | tojson -}}{{- ', ' if not loop.last -}}{%- endfor -%}{{- '][/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST] ' + (system if loop.index0 == ns.last else '') + m.content + '[/INST]' -}}
  {%- elif m.tool_calls -%}
    {{- '[TOOL_CALLS] [' -}}
    {%- for c in m.tool_calls -%}
      {%- if c.id | length != 9 -%}{{- raise_exception('call ids have 9 characters') -}}{%- endif -%}
      {{- '{"name": "' + c.function.name + '", "id": "' + c.id + '"}' -}}{{- ', ' if not loop.last -}}
    {%- endfor -%}{{- ']' + eos_token -}}
  {%- elif m.role == 'assistant' -%}{{- ' ' + m.content + eos_token -}}
  {%- elif m.role == 'tool' -%}
    {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
  {%- endif -%}
{%- endfor -%}"""
TEKKEN = MISTRAL3.replace("[INST] '", "[INST]'").replace("' ' + m.content + eos", "m.content + eos")
GEMMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('no system role') -}}{%- endif -%}
{%- for m in messages -%}
  {%- if (m.role == 'user') != (loop.index0 is even) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}
  {{- m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"""
QWEN3 = """
{%- if tools -%}
  {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') + '<tools>' -}}
  {%- for t in tools -%}{{- '\n' + t | tojson -}}{%- endfor -%}{{- '\n</tools><|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- endif -%}
{%- set ns = namespace(query=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' -}}
  {%- elif m.role == 'assistant' -%}
    {%- set content = m.content.split('</think>')[-1].lstrip('\n') -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.last and loop.index0 > ns.query -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
    {{- content -}}
    {%- for c in m.tool_calls or [] -%}
      {{- '\n' if content or not loop.first -}}
      {{- '<tool_call>\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson -}}
      {{- '\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' -}}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""
PHI3 = """
{%- for m in messages -%}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}"""
R1 = """
{{- bos_token -}}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{- m.content -}}
  {%- elif m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
  {%- else -%}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\n' -}}{%- endif -%}"""
VICUNA = """
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{- m.content -}}
  {%- elif m.role == 'user' -%}{{- ' USER: ' + m.content -}}
  {%- else -%}{{- ' ASSISTANT: ' + m.content + eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ' ASSISTANT:' -}}{%- endif -%}"""
GLM = """
{{- '[gMASK]' -}}
{%- for m in messages -%}{{- '<|' + m.role + '|>\n' + m.content -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"""


@dataclass(frozen=True)
class Family:
    """A template with what is known about it.

    backend: `bytes`, or a SentencePiece-like one that puts a space before the first word of a string (`first`),
    of every segment between control tokens (`prepend`), or of none (`never`).
    """

    template: str
    control: tuple[str, ...]
    bos: str | None
    eos: str
    stop: str
    backend: str = "bytes"
    folds: bool = False
    tools: bool = False
    thinks: bool = False
    rstrip: bool = False


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_L3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_PHI = ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
FAMILIES = {
    "chatml": Family(CHATML, _IM, None, "<|im_end|>", "<|im_end|>"),
    "chatml-default": Family(CHATML_DEFAULT, _IM, None, "<|im_end|>", "<|im_end|>"),
    "llama2": Family(LLAMA2, ("<s>", "</s>"), "<s>", "</s>", "</s>", "prepend"),
    "llama2-first": Family(LLAMA2, ("<s>", "</s>"), "<s>", "</s>", "</s>", "first"),
    "llama3": Family(LLAMA3, _L3, "<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"),
    "llama31": Family(LLAMA31, _L3, "<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>", tools=True),
    "mistral1": Family(MISTRAL1, ("<s>", "</s>"), "<s>", "</s>", "</s>", "prepend", folds=True),
    "mistral3": Family(MISTRAL3, _MISTRAL, "<s>", "</s>", "</s>", "prepend", tools=True),
    "tekken": Family(TEKKEN, _MISTRAL, "<s>", "</s>", "</s>", tools=True),
    "gemma": Family(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", "<end_of_turn>", "never", True
    ),
    "qwen3": Family(QWEN3, _IM, None, "<|im_end|>", "<|im_end|>", tools=True),
    "phi3": Family(PHI3, _PHI, "<s>", "<|endoftext|>", "<|end|>", "prepend", rstrip=True),
    "r1": Family(R1, (_BOS, _EOS, "<｜User｜>", "<｜Assistant｜>"), _BOS, _EOS, _EOS, thinks=True),
    "vicuna": Family(VICUNA, ("<s>", "</s>"), "<s>", "</s>", "</s>", "first"),
    "glm": Family(GLM, ("<|endoftext|>", "[gMASK]", "<|system|>", "<|user|>", "<|assistant|>"), None,
                  "<|endoftext|>", "<|user|>"),
}  # fmt: skip
_WORDS = [
    "Name two colours. You write Python. You write tests for the code above.",
    "[coder] [tester] [INST] [/INST] <<SYS>>\n<</SYS>>\n\nUSER: ASSISTANT: user assistant system model",
    "def add(a, b):\n    return a + b\n",
] * 4


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    if family.backend == "bytes":
        made = tiny_tokenizer(family.template, list(family.control), family.eos)
        if name in ("qwen3", "r1"):
            made.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>")])
    else:
        made = PreTrainedTokenizerFast(tokenizer_object=_sentencepiece(family), eos_token=family.eos)
        made.chat_template = family.template
    if family.bos:
        made.bos_token = family.bos
    return made


def _sentencepiece(family: Family) -> Tokenizer:
    """BPE on text whose spaces are `▁`, with bytes for what it does not know."""
    backend = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    alphabet = [chr(i) for i in range(33, 127)]
    backend.train_from_iterator(
        _WORDS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False)
    )
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = []
    for token in (*family.control, *(f"<0x{i:02X}>" for i in range(256))):
        spec["model"]["vocab"][token] = len(spec["model"]["vocab"])
    backend = Tokenizer.from_str(json.dumps(spec))
    if family.backend == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepend = [normalizers.Prepend("▁")] if family.backend == "prepend" else []
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁[^▁])"), "isolated")
    strip = [] if family.backend == "never" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=family.rstrip) for token in family.control]
    )
    return backend
