"""Conversations as prompts. The reference is `transformers`, which renders the same templates."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from baton.errors import InvalidRequest
from baton.limits import MAX_RENDERED_CHARS, MAX_TEMPLATE_CHARS
from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import OracleTokenizer, Tokenizer, load_tokenizer
from router.parsing.chat import Chats
from router.parsing.chat_template import Template, TemplateFailed
from router.parsing.generate_request import RequestParser
from tests.unit.test_tokenizer import save_bpe

TEXTS = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "title": "é <b>"}}}
CALL = pb.ToolCall(id="call00001", name="weather", arguments='{"city": "Köln", "days": [1, 2]}')
ASKED = [("system", " be brief "), ("user", "Hi 'you' <b>&"), ("assistant", "Hello\n"), ("user", "  and now? é")]
CALLED = [
    pb.ChatMessage(role="user", content="How is it?"),
    pb.ChatMessage(role="assistant", tool_calls=[CALL]),
    pb.ChatMessage(role="tool", content='{"rain": true}', tool_call_id="call00001", name="weather"),
]


def chat(*turns: tuple[str, str] | pb.ChatMessage, **more) -> pb.ChatMessages:
    made = [
        turn if isinstance(turn, pb.ChatMessage) else pb.ChatMessage(role=turn[0], content=turn[1]) for turn in turns
    ]
    return pb.ChatMessages(messages=made, **more)


def model(tmp_path: Path, template: object, **config: object) -> Tokenizer:
    """Create a model folder with this template: text in its own file, other values in tokenizer_config.json."""
    save_bpe(tmp_path, bos=True)
    if isinstance(template, str):
        (tmp_path / "chat_template.jinja").write_text(template)
    elif template is not None:
        config["chat_template"] = template
    tokens = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens | config))
    return load_tokenizer(tmp_path)


def as_peer_takes_it(message: pb.ChatMessage) -> dict[str, object]:
    made: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        function = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.tool_calls]
        made["tool_calls"] = [{"type": "function", "function": each} for each in function]
    return made


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize(
    ("name", "turns", "tools", "kwargs"),
    [
        ("llama3", ASKED, None, {}),
        ("llama3", ASKED[1:], [WEATHER], {"date_string": "1 May"}),
        ("llama3", CALLED, [WEATHER], {}),
        ("qwen", ASKED, None, {"enable_thinking": False}),
        ("qwen", ASKED, [WEATHER, WEATHER], {}),
        ("qwen", CALLED, [WEATHER], {"enable_thinking": True}),
        ("mistral", ASKED, None, {}),
    ],
)
async def test_prompts_equal_those_of_transformers(tmp_path, name, turns, tools, kwargs, prompted):
    template = TEXTS[name]
    tokenizer = model(tmp_path, template)
    asked = chat(*turns, add_generation_prompt=prompted)
    if tools:
        asked.tools = json.dumps(tools)
    if kwargs:
        asked.template_kwargs = json.dumps(kwargs)
    conversation = [as_peer_takes_it(message) for message in asked.messages]
    options = {"tools": tools, "chat_template": template, "add_generation_prompt": prompted, **kwargs}
    chats = Chats.of(tokenizer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    peer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **special)
    assert await chats.prompt(asked) == peer.apply_chat_template(conversation, tokenize=False, **options)
    right = peer.apply_chat_template(conversation, tokenize=True, return_dict=False, **options)
    assert await RequestParser(tokenizer, "m").encode(asked) == right


async def test_special_tokens_are_not_added_twice(tmp_path):
    tokenizer = model(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}")
    ids = await RequestParser(tokenizer, "m").encode(chat(("user", "some")))
    assert ids == [0, *tokenizer.encode("some")[1:], 1]
    assert tokenizer.encode("some")[0] == 0


async def test_a_request_takes_a_conversation(tmp_path):
    tokenizer = model(tmp_path, "{{ messages | length }}{% if add_generation_prompt %}!{% endif %}")
    asked = pb.ResumeRequest(request=pb.GenerateRequest(chat=chat(*ASKED)))
    spec = (await RequestParser(tokenizer, "m").parse(asked, "r", 100)).spec
    assert spec.sampling.max_tokens == 100 - len(spec.prompt), "an answer may be as long as fits"
    assert spec.prompt == tuple(tokenizer.encode_plain("4!"))
    tokenizer = model(tmp_path, "{% for m in messages %}{% endfor %}")
    with pytest.raises(InvalidRequest, match="chat: must not be empty"):
        await RequestParser(tokenizer, "m").parse(asked, "r", 100)


WRITTEN = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ CALL }}{% endfor %};"
    "{% endfor %}"
)


@pytest.mark.parametrize("call", ["'' + c.function.arguments", "c.function.arguments", "'a' ~ c.function.arguments"])
async def test_a_template_gets_arguments_in_the_form_that_it_takes(tmp_path, call):
    """DeepSeek's templates concatenate text. `transformers` writes this if the arguments are their JSON text."""
    template = WRITTEN.replace("CALL", call)
    prompt = await Chats.of(model(tmp_path, template)).prompt(chat(*CALLED))
    messages: list[Any] = [as_peer_takes_it(message) for message in CALLED]
    messages[1]["tool_calls"][0]["function"]["arguments"] = CALL.arguments
    peer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert prompt == peer.apply_chat_template(messages, tokenize=False, chat_template=template)
    assert CALL.arguments in prompt


# DeepSeek-V3, R1 and its distilled models write a call only if the content is None.
NONE = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content + '' }}{% endif %}"
    "{% endfor %}{{ tools }}"
)
NOT_HERE = "the model's chat template does not support tool calls here, it drops one of them"


@pytest.mark.parametrize("tools", [None, [WEATHER]])
async def test_a_call_without_content_reaches_a_template_that_writes_it_only_if_there_is_none(tmp_path, tools):
    """The called name is also in the tools."""
    asked = chat(*CALLED, tools=json.dumps(tools) if tools else None)
    prompt = await Chats.of(model(tmp_path, NONE)).prompt(asked)
    messages: list[Any] = [as_peer_takes_it(message) for message in CALLED]
    messages[1]["content"], messages[1]["tool_calls"][0]["function"]["arguments"] = None, CALL.arguments
    [right], _ = render_jinja_template([messages], chat_template=NONE, tools=tools)
    assert prompt == right, "as `apply_chat_template` rendered it before it removed None"
    assert f"<call>weather{CALL.arguments}" in prompt


SPOKEN = pb.ChatMessage(role="assistant", content="I look", tool_calls=[CALL])
ONE_OF_TWO = pb.ChatMessage(role="assistant", tool_calls=[CALL, pb.ToolCall(id="2", name="clock", arguments="{}")])
ONLY_FIRST = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "calling"),
    [
        ("{% for m in messages[:1] %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", SPOKEN),
        ("{% for m in messages %}{{ m.content + '' }}{% if m.tool_calls is mapping %}{% endif %}{% endfor %}", SPOKEN),
    ],
    ids=["the first message only", "none"],
)
async def test_a_call_that_a_template_drops_in_each_form_is_refused(tmp_path, template, calling):
    with pytest.raises(InvalidRequest) as caught:
        await Chats.of(model(tmp_path, template)).prompt(chat(CALLED[0], calling, CALLED[2]))
    assert [*map(str, caught.value.violations)] == [f"chat.messages[1].tool_calls: {NOT_HERE}"]


@pytest.mark.parametrize(
    ("template", "calling", "prompt"),
    [
        (NONE, SPOKEN, 'How is it?I look<call>weather{"a":1}{"rain": true}late'),
        (ONLY_FIRST, ONE_OF_TWO, 'How is it?weather{"rain": true}clocklate'),
    ],
    ids=["content and a call", "two calls"],
)
async def test_a_call_that_a_template_drops_next_to_others_has_its_own_message(tmp_path, template, calling, prompt):
    """Each call is followed by its result."""
    calling.tool_calls[0].arguments = '{"a":1}'
    results = [CALLED[2], pb.ChatMessage(role="tool", tool_call_id="2", content="late")]
    written = await Chats.of(model(tmp_path, template)).prompt(chat(CALLED[0], calling, *results))
    assert written.removesuffix("None") == prompt


# gpt-oss keeps reasoning between calls, and takes a content next to a call as reasoning.
REASONS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("continued", [False, True])
async def test_only_messages_with_several_calls_are_split_and_reasoning_stays(tmp_path, continued):
    def calls(*names: str, **fields: str) -> pb.ChatMessage:
        made = [pb.ToolCall(id=name, name=name, arguments="{}") for name in names]
        return pb.ChatMessage(role="assistant", tool_calls=made, **fields)

    def result(name: str) -> pb.ChatMessage:
        return pb.ChatMessage(role="tool", tool_call_id=name, content=f"={name}")

    turns: list[Any] = [("user", "x"), calls("geo", reasoning="think0"), result("geo")]
    turns += [calls("wA", "wB", content="I look", reasoning="plan1"), result("wB"), result("wA"), ("assistant", "So")]
    asked = chat(*turns, continue_final_message=continued)
    asked.add_generation_prompt = not continued
    prompt = await Chats.of(model(tmp_path, REASONS)).prompt(asked)
    assert prompt == (
        "<user>x<assistant>think0[geo]<tool>=geo<assistant>plan1I look[wA]<tool>=wA<assistant>[wB]<tool>=wB"
        "<assistant>So"
    )


async def test_each_of_many_calls_is_looked_for(tmp_path):
    """A template that writes only the first call of a message drops the second one, also next to ten others."""
    many = [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name=f"n{n}", arguments="{}")]) for n in range(9)]
    prompt = await Chats.of(model(tmp_path, ONLY_FIRST)).prompt(chat(CALLED[0], ONE_OF_TWO, *many))
    assert "weatherclockn0n1" in prompt


async def test_a_long_conversation_with_calls_is_read_in_linear_time(tmp_path):
    """It would take minutes if each call were looked for among all results, or each mark in the whole text."""
    calls = [pb.ToolCall(id=str(n), name="f", arguments="{}") for n in range(4000)]
    results = [pb.ChatMessage(role="tool", tool_call_id=str(n), content="r") for n in range(4000)]
    prompt = await Chats.of(model(tmp_path, ONLY_FIRST)).prompt(
        chat(CALLED[0], pb.ChatMessage(role="assistant", tool_calls=calls), *results)
    )
    assert prompt == "How is it?" + "fr" * 4000


async def test_a_template_that_checks_names_of_calls_gets_them(tmp_path):
    checks = "{% for c in messages[1].tool_calls %}{{ {'weather': 'rain'}[c.function.name] + '' }}{% endfor %}"
    assert await Chats.of(model(tmp_path, checks)).prompt(chat(*CALLED)) == "rain"


ONLY_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ p['text'] }}{% endfor %}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %};{% endfor %}"
)
FIRST_PART = "{% for m in messages %}{{ m.role + ': ' + m.content[0]['text'] + ';' }}{% endfor %}"


@pytest.mark.parametrize("template", [ONLY_PARTS, FIRST_PART], ids=["drops", "fails"])
@pytest.mark.parametrize("continued", [False, True])
async def test_a_template_that_takes_only_parts_gets_contents_as_parts(tmp_path, template, continued):
    turns = ASKED[:3] if continued else ASKED
    prompt = await Chats.of(model(tmp_path, template)).prompt(chat(*turns, continue_final_message=continued))
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    peer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    right = peer.apply_chat_template(messages, tokenize=False, chat_template=template)
    assert prompt == (right.removesuffix(";") if continued else right)
    assert "Hi 'you' <b>&" in prompt


@pytest.mark.parametrize("turns", [[("user", "A) red"), ("assistant", "Which?"), ("user", "user")], [("system", "s")]])
async def test_texts_that_a_template_writes_itself_do_not_hide_that_it_takes_parts(tmp_path, turns):
    prompt = await Chats.of(model(tmp_path, ONLY_PARTS)).prompt(chat(*turns))
    assert prompt == "".join(f"{role}: {text};" for role, text in turns)


async def test_calls_reach_a_template_that_takes_only_parts(tmp_path):
    wanted = 'user: How is it?;assistant: weather;tool: {"rain": true};'
    assert await Chats.of(model(tmp_path, ONLY_PARTS)).prompt(chat(*CALLED)) == wanted


@pytest.mark.parametrize(
    ("changing", "text"),
    [
        ("m.content | upper", "HELLO"),
        ("m.content[:2]", "He"),
        ("'' ~ m.content[:2]", "He"),
        ("'hi' if m.content is string else 'no'", "hi"),
    ],
)
async def test_a_template_that_changes_texts_gets_texts(tmp_path, changing, text):
    """The middle ones would write a list of parts as Python shows it."""
    template = f"{{% for m in messages %}}{{{{ {changing} }}}}{{% endfor %}}"
    assert await Chats.of(model(tmp_path, template)).prompt(chat(("user", "Hello"))) == text


async def test_developers_are_the_system_for_templates(tmp_path):
    chats = Chats.of(model(tmp_path, "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"))
    assert await chats.prompt(chat(("developer", "be brief"), ("user", "x"))) == "system=be brief;user=x;"


async def test_reasoning_of_earlier_answers_reaches_the_template(tmp_path):
    chats = Chats.of(model(tmp_path, "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }};{% endfor %}"))
    said = pb.ChatMessage(role="assistant", content="Hi", reasoning="hm")
    assert await chats.prompt(chat(("user", "x"), said)) == ";hmhm;"


OPENED = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "parser", "form", "opened"),
    [
        (OPENED, "auto", "think", True),
        (OPENED, "none", "", False),
        (OPENED, "magistral", "magistral", False),
        ("{{ messages[0].content }}</think>", "auto", "think", False),
        ("{{ messages[0].content }}[THINK]", "auto", "magistral", True),
        ("<|start|>assistant<|channel|>final", "auto", "harmony", False),
        ("Here is my thought process: {{ messages[0].content }}", "auto", "granite", False),
        ("{{ messages[0].content }}", "auto", "", False),
    ],
)
async def test_the_form_of_reasoning(tmp_path, template, parser, form, opened):
    made = RequestParser(model(tmp_path, template), "m", reasoning_parser=parser)
    asked = pb.ResumeRequest(request=pb.GenerateRequest(chat=chat(("user", "a b"))))
    asked.request.constraint.choices.texts.append("yes")
    parsed = await made.parse(asked, "r", 100)
    assert (made.reasoning_form, parsed.in_reasoning) == (form, opened)
    ends = {"think": ("</think>",), "magistral": ("[/THINK]",)}
    assert parsed.spec.constraint is not None
    assert parsed.spec.constraint.after == (ends[form] if opened else ()), "it holds after the thought"


async def test_a_token_shows_the_form_of_reasoning(tmp_path):
    tokenizer = model(tmp_path, "{{ messages[0].content }}", added_tokens_decoder={"700": {"content": "[THINK]"}})
    assert Chats.of(tokenizer).reasoning_form == "magistral"


async def test_json_that_is_no_text_is_refused(tmp_path):
    tokenizer = model(tmp_path, TEXTS["qwen"])
    calling = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(arguments='{"x": "\\ud800"}')])
    for asked in (chat(("user", "x"), tools='[{"x": "\\ud800"}]'), chat(("user", "x"), calling)):
        with pytest.raises(InvalidRequest, match="chat: its JSON contains half a surrogate pair"):
            await RequestParser(tokenizer, "m").encode(asked)


async def test_the_oracle_has_a_plain_template_and_the_demo_model_reads_what_was_said():
    assert await Chats.of(OracleTokenizer()).prompt(chat(("user", "hi"))) == "user: hi\nassistant:"
    tokenizer = load_tokenizer(DEMO)
    assert await Chats.of(tokenizer).prompt(chat(("user", "A flute"), ("user", "is an"))) == "A flute is an"


# Phi-4-mini takes tools as a field of the system message, which no API has.
OWN_TOOLS = (
    "{% for m in messages %}{% if 'tools' in m and m['tools'] is not none %}<tool_call>{{ m['tools'] }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("llama3", "llama"),
        ("qwen", "hermes"),
        ("mistral", ""),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} '[TOOL_CALLS]' ~ name ~ '[ARGS]'", "mistral"),
        ("{{ tools }}<tool_call>\n<function=name>\n<parameter=key>", "qwen3_coder"),
        ("{{ tools }}<tool_call>name\n<arg_key>", "glm"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi"),
        ("{{ tools }}<|start|>assistant<|channel|>final", "harmony"),
        ("{{ tools }}<|tool_call|>", "granite"),
        ("{{ tools }}[func_name1(params_name1=value)]", "pythonic"),
        ("{{ tools }}<tool_call>\n<function=", "json"),
        ("{% if tools %}{% endif %}", "json"),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}<tool_call>", "hermes"),
        (OWN_TOOLS, ""),
        ("<tool_call>", ""),
    ],
)
def test_forms_of_calls(source, form):
    assert Template(TEXTS.get(source, source)).tool_form == form


async def test_of_several_templates_the_one_for_tools_is_taken(tmp_path):
    of_tools = "{{ tools | length }} tools<tool_call>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": of_tools}]
    chats = Chats.of(model(tmp_path, named))
    assert await chats.prompt(chat(*ASKED)) == "plain"
    assert await chats.prompt(chat(*ASKED, tools=json.dumps([WEATHER]))) == "1 tools<tool_call>"
    assert await chats.prompt(chat(*ASKED, tools="[]")) == "plain"
    assert [each.tool_form for each in (chats, Chats.of(OracleTokenizer()), Chats({}, {}))] == ["hermes", "", ""]


@pytest.mark.parametrize("turn", CALLED[1:], ids=["call", "result"])
async def test_the_template_for_tools_renders_past_calls_without_tools(tmp_path, turn):
    names = "{{ messages[0].tool_calls | map(attribute='function.name') | join }}"
    of_tools = "{% for each in tools %}{% endfor %}{{ tools }}" + names + " calls"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": of_tools}]
    chats = Chats.of(model(tmp_path, named))
    name = "".join(call.name for call in turn.tool_calls)
    assert await chats.prompt(chat(turn)) == f"[]{name} calls"
    (tmp_path / "one").mkdir()
    chats = Chats.of(model(tmp_path / "one", of_tools.replace("tools %}", "tools or [] %}")))
    assert await chats.prompt(chat(turn)) == f"None{name} calls", "as transformers renders it"


async def test_the_first_unknown_variables_are_named(tmp_path):
    """A body of 1 MiB has 110,000 of them."""
    asked = chat(("user", "x"), template_kwargs=json.dumps({f"y{number}": 1 for number in range(1000)}))
    with pytest.raises(InvalidRequest) as caught:
        await Chats.of(model(tmp_path, "{{ messages }}{{ x }}")).prompt(asked)
    assert [each.description[:4] for each in caught.value.violations] == [f"'y{number}'" for number in range(8)]


async def test_templates_of_own_files_are_chosen_as_transformers_does(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} old"}]
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    for files, wanted in (
        ({}, ["plain", "1 old"]),
        ({"additional_chat_templates/tool_use.jinja": "{{ tools | length }} new"}, None),
        ({"chat_template.jinja": "file"}, ["file", "1 new"]),
        ({"additional_chat_templates/rag.jinja": "rag"}, ["file", "1 new"]),
    ):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        chats = Chats.of(model(tmp_path, named))
        peer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        if wanted is None:
            with pytest.raises(InvalidRequest, match="have no default"):
                await chats.prompt(chat(*ASKED))
            continue
        found = [await chats.prompt(chat(*ASKED)), await chats.prompt(chat(*ASKED, tools=json.dumps([WEATHER])))]
        turns = [{"role": role, "content": content} for role, content in ASKED]
        right = [peer.apply_chat_template(turns, tokenize=False, tools=tools) for tools in (None, [WEATHER])]
        assert found == right == wanted


async def test_the_template_of_a_processor_is_the_last_choice(tmp_path):
    """Mistral Small 3.1 has its template only in this file."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert await Chats.of(model(tmp_path, None)).prompt(chat(*ASKED)) == "processor"
    named = [{"name": "default", "template": "plain"}]
    assert await Chats.of(model(tmp_path, named)).prompt(chat(*ASKED)) == "plain"


UNUSABLE = [
    (None, "the model has no chat template; send text or token_ids"),
    ("{% for %}", "cannot be used: TemplateSyntaxError"),
    ("x" * (MAX_TEMPLATE_CHARS + 1), "cannot be used: it has 262145 characters, of 262144 at most"),
    ([{"name": "default"}], "cannot be used: chat_template must be a text, or a list"),
    ([{"name": "tool_use", "template": "x"}], "the model's chat templates have no default"),
    (7, "chat_template must be a text"),
]
DEEP = "[" * 100_000
CALLS_NOTHING = chat(pb.ChatMessage(role="a", tool_calls=[CALL, pb.ToolCall(arguments="[]")]))
NO_Y = "'y' is not a variable of the model's chat template; it has x"
WRONG_TURNS = [
    (chat(), "chat.messages", "1 to 10000 messages, got 0"),
    (chat(("", "x")), "chat.messages[0].role", "1 to 64"),
    (chat(("user", ""), ("r" * 65, "x")), "chat.messages[1].role", "1 to 64"),
    (chat(("user", "x" * 1_000_001)), "chat", "at most 1000000 bytes"),
    (chat(("user", "x"), tools="{}"), "chat.tools", "JSON array"),
    (chat(("user", "x"), tools="[1]"), "chat.tools", "JSON array of objects"),
    (chat(("user", "x"), tools=DEEP), "chat.tools", "JSON array"),
    (chat(("user", "x"), tools=json.dumps([WEATHER] * 129)), "chat.tools", "at most 128 tools, got 129"),
    (chat(pb.ChatMessage(role="a", name="n" * 257)), "chat.messages[0].name", "at most 256 characters, got 257"),
    (chat(("user", "x"), tools=json.dumps([WEATHER])), "chat.tools", "does not support tools"),
    (chat(("user", "x"), template_kwargs="[]"), "chat.template_kwargs", "JSON object"),
    (chat(("user", "x"), template_kwargs='{"y": 1}'), "chat.template_kwargs", NO_Y),
    (chat(("user", "x"), template_kwargs='{"messages": 1}'), "chat.template_kwargs", "'messages' is not"),
    (chat(("user", "x"), template_kwargs='{"bos_token": "x"}'), "chat.template_kwargs", "'bos_token' is not"),
    (chat(("user", "x"), template_kwargs='{"range": 1}'), "chat.template_kwargs", "'range' is not"),
    (chat(pb.ChatMessage(role="a", tool_calls=[CALL])), "chat.messages[0].tool_calls", "not support tool calls"),
    (CALLS_NOTHING, "chat.messages[0].tool_calls[1].arguments", "JSON object"),
]
X_TIMES = "{{ bos_token }}{% for i in range(x or 1) %}{{ messages[i].content }}{% endfor %}"
ALTERNATE = "the model's chat template rejects it: Conversation roles must alternate"


@pytest.mark.parametrize(
    ("template", "asked", "field", "words"),
    [
        *((template, chat(*ASKED), "chat", words) for template, words in UNUSABLE),
        *((X_TIMES, *wrong) for wrong in WRONG_TURNS),
        (TEXTS["mistral"], chat(("assistant", "x")), "chat", ALTERNATE),
        (OWN_TOOLS, chat(("user", "x"), tools=json.dumps([WEATHER])), "chat.tools", "does not support tools"),
    ],
)
async def test_what_no_prompt_can_be_made_of_is_refused_by_name(tmp_path, template, asked, field, words):
    chats = Chats.of(model(tmp_path, template))
    with pytest.raises(InvalidRequest) as caught:
        await chats.prompt(asked)
    [violation] = caught.value.violations
    assert violation.field == field
    assert words in violation.description


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{{ 'a' * 10**9 }}", "larger than 1000000"),
        ("{{ 9 ** 99999999 }}", "larger than 1000000"),
        ("{% for i in range(99999999) %}{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(99) %}{{ messages[0].content * 9000 }}{% endfor %}", f"more than {MAX_RENDERED_CHARS}"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 2 s"),
        ("{% macro f() %}{% endmacro %}{% for i in range(9999) %}{{ f() }}{% endfor %}", "longer than 2 s"),
    ],
)
def test_a_template_can_take_only_so_much(template, words):
    """The clock moves by a millisecond with each look, so that the test takes no time."""
    ticking = map((0.001).__mul__, count())
    with pytest.raises(TemplateFailed, match=words):
        Template(template, lambda: next(ticking)).render({"messages": [{"content": "ab"}]})


LOOPS, DEPTH = "{% for a in b %}" * 25 + "{% endfor %}" * 25, "{{ " + "(" * 500 + "1" + ")" * 500 + " }}"
NAMED_TWICE = ["{{ f(a=1, a=2) }}", "{% macro f(a, a) %}{% endmacro %}"]


@pytest.mark.parametrize("template", [LOOPS, DEPTH, *NAMED_TWICE, "{% break %}", "{{ " + "9" * 5000 + " }}"])
def test_what_jinja_reads_and_python_does_not_is_no_template(template):
    with pytest.raises(TemplateFailed):
        Template(template)


def test_variables_and_fields_of_a_template_are_known():
    template = Template(
        "{% set a = 1 %}{{ a }}{{ b }}{{ m.tool_calls }}{{ m['x'] }}{{ strftime_now('%d') }}{{ namespace() }}"
    )
    assert template.variables == {"b", "m"}
    assert Template("{{ strftime_now('%Y') | int > 2000 }}").render({}) == "True"
    assert [template.mentions(word) for word in ("b", "tool_calls", "x", "y")] == [True, True, True, False]


@pytest.mark.parametrize("text", ["Once upon", " a  time \n", "", "é 😀"])
@pytest.mark.parametrize("name", sorted(TEXTS))
async def test_a_message_is_continued_as_transformers_does(tmp_path, name, text):
    made = model(tmp_path, TEXTS[name])
    turns = [("user", "tell"), ("assistant", text)]
    messages = [{"role": role, "content": content} for role, content in turns]
    peer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    wanted = peer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert await Chats.of(made).prompt(chat(*turns, continue_final_message=True)) == wanted


async def test_an_effort_reaches_only_templates_that_read_it(tmp_path):
    for source, text in (("{{ reasoning_effort }}", "low"), ("x", "x")):
        assert await Chats.of(model(tmp_path, source)).prompt(chat(("user", "a"), reasoning_effort="low")) == text


async def test_special_tokens_of_texts_and_chats_can_be_chosen(tmp_path):
    made = model(tmp_path, "{{ messages[0].content }}")
    parser, bos = RequestParser(made, "m"), made.encode("")
    assert bos
    for source in ("hi", chat(("user", "hi"))):
        plain, added = await parser.encode(source, False), await parser.encode(source, True)
        assert added == [*bos, *plain]
        assert await parser.encode(source) == (added if source == "hi" else plain)
