"""Constrained decoding with random logits: the model that knows nothing still answers in the right form."""

import enum
import gc
import json
import sys
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qkvshare_agents.errors import InvalidSetting, MissingDependency, UnsupportedModel
from qkvshare_agents.prompt.grammar import Grammar
from qkvshare_agents.prompt.tool_calls import parse_tool_calls

SPECIAL = ["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]"]
PADDING = 37  # logits beyond the vocabulary, as in heads padded for speed
SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def build(**options: Any) -> Any:
    """A byte-level BPE tokenizer of about 400 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = '{"name": "add", "arguments": {"items": [{"name": "x", "count": 12}]}} <tool_call> yes please \n\n'
    tokenizer.train_from_iterator([text, text.replace(" ", "")] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "<|im_end|>", **options})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("llguidance", reason="constrained decoding is an extra")
    return build()


def generate(
    tokenizer: Any, grammar: Grammar, seed: int, favourite: int = 0, stop: int | None = None, limit: int = 300
) -> str:
    """Sample from random logits, one token preferred, until the end of the turn; every mask is checked."""
    stop = tokenizer.eos_token_id if stop is None else stop
    source, matcher = torch.Generator().manual_seed(seed), grammar.start()
    ids: list[int] = []
    for _ in range(limit):
        logits = torch.randn(len(tokenizer) + PADDING, generator=source)
        logits[favourite] += 20
        before = logits.clone()
        masked = matcher.mask(logits)
        assert torch.equal(logits, before)
        allowed = masked.isfinite()
        assert torch.equal(masked[allowed], logits[allowed])
        assert allowed.any() and not allowed[len(tokenizer) :].any()
        assert not matcher.finished or allowed.nonzero().flatten().tolist() == [stop]
        token = int(torch.multinomial(masked.softmax(-1), 1, generator=source))
        matcher.accept(token)
        if token == stop:
            return tokenizer.decode(ids)
        ids.append(token)
    raise AssertionError(f"no end after {limit} tokens: {tokenizer.decode(ids)!r}")


class Colour(enum.Enum):
    RED = "red"
    GREEN = "grün"


class Item(BaseModel):
    name: str = Field(max_length=4)
    count: int = Field(ge=0, le=100)


class Order(BaseModel):
    items: list[Item] = Field(max_length=2)
    colour: Colour
    note: str | None = Field(default=None, max_length=4)


@SLOW
@given(seed=st.integers(0, 2**32), favourite=st.integers(0, 399))
def test_schema_always_ends_in_valid_json(tokenizer: Any, seed: int, favourite: int) -> None:
    grammar = Grammar.json_schema(tokenizer, Order.model_json_schema())
    text = generate(tokenizer, grammar, seed, favourite % len(tokenizer))
    order = Order.model_validate_json(text)
    assert text == json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")) or "\\" in text
    assert set(json.loads(text)) <= set(Order.model_fields) and len(order.items) <= 2


def test_end_is_allowed_exactly_when_complete(tokenizer: Any) -> None:
    matcher = Grammar.json_schema(tokenizer, Order.model_json_schema()).start()
    text = '{"items":[{"name":"é\\"","count":7}],"colour":"red"}'
    ids = tokenizer.encode(text, add_special_tokens=False)
    for token in ids:
        masked = matcher.mask(torch.zeros(len(tokenizer)))
        assert masked[tokenizer.eos_token_id] == float("-inf") and masked[token] == 0
        assert not matcher.finished
        matcher.accept(token)
    assert matcher.finished
    assert matcher.mask(torch.zeros(len(tokenizer))).isfinite().nonzero().tolist() == [[tokenizer.eos_token_id]]
    matcher.accept(tokenizer.eos_token_id)
    assert matcher.finished


def follows(tokenizer: Any, grammar: Grammar, text: str) -> bool:
    matcher = grammar.start()
    try:
        for token in tokenizer.encode(text, add_special_tokens=False):
            matcher.accept(token)
    except InvalidSetting:
        return False
    return bool(matcher.mask(torch.zeros(len(tokenizer)))[tokenizer.eos_token_id] == 0)


def test_json_object(tokenizer: Any) -> None:
    grammar = Grammar.json_object(tokenizer)
    assert all(follows(tokenizer, grammar, text) for text in ("{}", '{"a":[1,{"b":null}]}', '{"ü":"\\n"}'))
    assert not any(follows(tokenizer, grammar, text) for text in ("[]", '{"a": 1}', "{ }", '{"a":1', "1", "", "{}{}"))


NODE = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMAS = {
    "closed": (NODE, ["{}", '{"a":1}'], ['{"b":1}', '{"a":1,"b":1}', "[]"]),
    "open on request": ({**NODE, "additionalProperties": True}, ['{"a":1,"b":1}', '{"b":[]}'], ["[]"]),
    "closed inside": ({"type": "array", "items": NODE}, ['[{"a":1}]'], ['[{"b":1}]']),
    "all of": (
        {"allOf": [NODE, {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]},
        ['{"a":1,"b":null}'],
        ['{"a":1}'],
    ),
    "any of": ({"anyOf": [NODE, {"type": "null"}]}, ['{"a":1}', "null"], ['{"b":1}']),
    "reference": (
        {"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}}}},
        ['{"n":{"n":{}}}'],
        ['{"m":1}', '{"n":{"m":1}}'],
    ),
    "a property called properties": (
        {"type": "object", "properties": {"type": {"const": "object"}, "properties": {"type": "boolean"}}},
        ['{"type":"object","properties":true}'],
        ['{"a":1}'],
    ),
    "spacing is ours": ({**NODE, "x-guidance": {"whitespace_flexible": True}}, ['{"a":1}'], ['{ "a": 1}']),
}


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS.values(), ids=SCHEMAS)
def test_schemas(tokenizer: Any, schema: dict, good: list[str], bad: list[str]) -> None:
    before = json.dumps(schema)
    grammar = Grammar.json_schema(tokenizer, schema)
    assert [text for text in good if not follows(tokenizer, grammar, text)] == []
    assert [text for text in bad if follows(tokenizer, grammar, text)] == []
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nope"}, "nope"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"if": {"type": "object"}, "then": {}}, "if"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "Unsatisfiable"),
        ({"type": "string", "pattern": "("}, "("),
        ({"type": object}, "serializable"),
        ("{}", "mapping"),
    ],
)
def test_schema_that_cannot_be_enforced(tokenizer: Any, schema: Any, reason: str) -> None:
    with pytest.raises(InvalidSetting, match="schema") as caught:
        Grammar.json_schema(tokenizer, schema)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "…", "parameters": parameters}}


NUMBER = {"type": "integer", "minimum": 1, "maximum": 99}
TOOLS = [
    tool("add", a=NUMBER, b=NUMBER),
    tool('größe "x"', unit={"enum": ["m", "</tool_call>"]}),
    {"type": "function", "function": {"name": "now"}},
]
NAMES = {entry["function"]["name"]: entry["function"].get("parameters", {}) for entry in TOOLS}
MARKS = [
    ("<tool_call>\n", "\n</tool_call>"),
    ("[TOOL_CALLS][", "]"),
    ("<|im_start|>[TOOL_CALLS] [", "]"),
    ("", ""),
]


@SLOW
@given(seed=st.integers(0, 2**32), favourite=st.integers(0, 399), marks=st.sampled_from(MARKS))
def test_tool_call_parses_back(tokenizer: Any, seed: int, favourite: int, marks: tuple[str, str]) -> None:
    grammar = Grammar.tool_calls(tokenizer, TOOLS, *marks)
    text = generate(tokenizer, grammar, seed, favourite % len(tokenizer))
    _, (call,) = parse_tool_calls(text, NAMES)
    assert f'"arguments": {call.arguments}}}' in text, "the call must be spelled as a template spells it"
    assert set(json.loads(call.arguments)) == set(NAMES[call.name].get("properties", ()))


def test_special_tokens_come_as_tokens(tokenizer: Any) -> None:
    grammar = Grammar.tool_calls(tokenizer, TOOLS, "[TOOL_CALLS][", "]")
    allowed = grammar.start().mask(torch.zeros(len(tokenizer))).isfinite().nonzero().flatten().tolist()
    assert allowed == [tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")]


@pytest.mark.parametrize("tools", [[], [{}], [{"type": "function", "function": {}}], [{"function": {"name": 1}}]])
def test_tools_that_are_none(tokenizer: Any, tools: list[dict]) -> None:
    with pytest.raises(InvalidSetting, match="at least one tool"):
        Grammar.tool_calls(tokenizer, tools)


def test_tool_with_a_schema_that_cannot_be_enforced(tokenizer: Any) -> None:
    with pytest.raises(InvalidSetting, match="nope"):
        Grammar.tool_calls(tokenizer, [tool("add", a={"type": "nope"})])


def test_choice_goes_on_where_one_option_begins_another(tokenizer: Any) -> None:
    grammar = Grammar.choice(tokenizer, ["yes", "yes please", "no"])
    assert {generate(tokenizer, grammar, seed) for seed in range(60)} == {"yes", "yes please", "no"}
    matcher = grammar.start()
    for token in tokenizer.encode("yes", add_special_tokens=False):
        matcher.accept(token)
    assert not matcher.finished
    assert matcher.mask(torch.zeros(len(tokenizer)))[tokenizer.eos_token_id] == 0


@SLOW
@given(options=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=3))
def test_choice_of_any_text(tokenizer: Any, options: list[str]) -> None:
    grammar = Grammar.choice(tokenizer, options)
    assert all(follows(tokenizer, grammar, option) for option in options)


@pytest.mark.parametrize("options", [[], [""], ["a", ""], "yes"])
def test_choice_of_nothing(tokenizer: Any, options: Any) -> None:
    with pytest.raises(InvalidSetting, match="choice"):
        Grammar.choice(tokenizer, options)


def test_matchers_share_no_state(tokenizer: Any) -> None:
    grammar = Grammar.choice(tokenizer, ["yes", "no"])
    first, second = grammar.start(), grammar.start()
    before = second.mask(torch.zeros(len(tokenizer)))
    first.accept(tokenizer.convert_tokens_to_ids("y"))
    assert torch.equal(second.mask(torch.zeros(len(tokenizer))), before)
    assert torch.equal(grammar.start().mask(torch.zeros(len(tokenizer))), before)


def test_token_that_was_not_allowed(tokenizer: Any) -> None:
    for token in (tokenizer.convert_tokens_to_ids("z"), tokenizer.eos_token_id, 10**6):
        matcher = Grammar.choice(tokenizer, ["yes"]).start()
        with pytest.raises(InvalidSetting, match="enforced"):
            matcher.accept(token)
        assert not matcher.finished
        with pytest.raises(InvalidSetting, match="enforced"):
            matcher.mask(torch.zeros(len(tokenizer)))


def test_logits_of_any_type_and_length(tokenizer: Any) -> None:
    matcher = Grammar.choice(tokenizer, ["yes"]).start()
    for size in (len(tokenizer), len(tokenizer) + 1, 512):
        masked = matcher.mask(torch.zeros(size, dtype=torch.bfloat16))
        assert masked.dtype == torch.bfloat16 and masked.shape == (size,) and masked.isfinite().any()
    first = tokenizer.encode("yes", add_special_tokens=False)[0]
    assert matcher.mask(torch.zeros(first + 1))[first] == 0, "a head smaller than the vocabulary"


def test_stop_ids(tokenizer: Any) -> None:
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    grammar = Grammar.choice(tokenizer, ["yes"], stop_ids=[start])
    assert generate(tokenizer, grammar, seed=0, stop=start) == "yes"
    both = [start, tokenizer.eos_token_id]
    matcher = Grammar.choice(tokenizer, ["yes"], stop_ids=both).start()
    for token in tokenizer.encode("yes", add_special_tokens=False):
        matcher.accept(token)
    assert matcher.mask(torch.zeros(len(tokenizer))).isfinite().nonzero().flatten().tolist() == both


def test_vocabulary_is_read_once_and_let_go(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance.hf

    read = Mock(wraps=llguidance.hf.from_tokenizer)
    monkeypatch.setattr(llguidance.hf, "from_tokenizer", read)
    own = build()
    for option in ("yes", "no"):
        Grammar.choice(own, [option])
    assert read.call_count == 1
    own.add_tokens(["<tool_call>"])
    grammar = Grammar.choice(own, ["yes"])
    assert read.call_count == 2, "a token was added"
    gone = weakref.ref(own)
    read.reset_mock()  # it remembers its arguments
    del own
    gc.collect()
    assert gone() is None
    assert not grammar.start().finished


def test_tokenizer_without_end_of_turn(tokenizer: Any) -> None:
    endless = build(eos_token=None)
    with pytest.raises(UnsupportedModel, match="stop_ids"):
        Grammar.choice(endless, ["yes"])
    assert follows(tokenizer, Grammar.choice(endless, ["yes"], stop_ids=[tokenizer.eos_token_id]), "yes")


def test_tokenizer_that_cannot_be_read(tokenizer: Any) -> None:
    words = Tokenizer(models.WordLevel({"yes": 0, "?": 1}, unk_token="?"))
    with pytest.raises(UnsupportedModel, match="can't be read"):
        Grammar.choice(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="yes"), ["yes"])


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(MissingDependency, match=r"qkvshare-agents\[autogen\]"):
        Grammar.json_object(build())
