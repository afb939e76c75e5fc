"""`--show`, the prompt on standard input, and the choice of the cluster."""

import io
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli import target
from baton.cli.app import app
from baton.cli.requests import generate as command
from baton.cli.requests.generate import latency, parse_show, placed, stream_answer
from baton.client._accumulator import Fold
from baton.cluster.state_dir import ClusterState, ProcessId, StateFolder
from baton.errors import ConfigError, EngineFault, InvalidRequest, NoWorker
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference

Event = inference.GenerateEvent
PAIR, MOVED = {"prefill_worker": "p-0", "decode_worker": "d-0"}, {"kv_bytes": 4096, "transport": "shm"}


@pytest.mark.parametrize(
    ("text", "names"), [("", set()), ("timings", {"timings"}), (" tokens , timings,", {"tokens", "timings"})]
)
def test_show(text, names):
    assert parse_show(text) == names
    with pytest.raises(InvalidRequest, match="'colors' is not one of timings"):
        parse_show(f"{text},colors")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (PAIR | MOVED, "prefill on p-0 -> 4,096 bytes of KV over shm -> decode on d-0"),
        ({"prefill_worker": "p-0"}, "prefill on p-0; its first token ended the answer, so no handoff took place"),
        ({"prefill_worker": "d-0", "decode_worker": "d-0"}, "prefill and decode on d-0; no KV was moved"),
        ({"decode_worker": "d-0"}, "decode on d-0, begun at another router"),
    ],
)
def test_who_did_what_is_said_in_words(facts, text):
    assert placed(completed((), placement=inference.Placement(**facts))) == text


@pytest.mark.parametrize(("ids", "text"), [([7], "TTFT 250.0 ms"), ([], "no token")])
def test_an_answer_without_a_token_has_no_ttft(ids, text):
    assert latency(completed(ids, timings=common.Timings(ttft_s=len(ids) / 4, e2e_s=1))) == text


def completed(ids, **facts):
    """Return an answer with these tokens, which ended with these facts."""
    tokens = [Event(tokens=inference.Tokens(ids=[each])) for each in ids]
    stream = Thinking(*tokens, *ended(common.FINISH_REASON_EOS, **facts))
    list(stream)
    return stream.collect()


def ended(reason, **facts):
    finished, completed = inference.Finished(reason=reason), inference.Completed(**facts)
    return Event(finished=finished), Event(completed=completed)


class Thinking(Fold):
    """A stream of these messages, and a client that has it. `asked` are the options."""

    def __init__(self, *messages: Event) -> None:
        super().__init__()
        self._messages, self.asked, self.prompt = messages, dict[str, object](), ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def stream(self, prompt, **options):
        self.prompt, self.asked = prompt, options
        return self

    def __iter__(self):
        for seq, message in enumerate(self._messages):
            message.seq = seq
            if (delta := self._feed(message)) is not None:
                yield delta

    def collect(self):
        return self._completion()


def thinking() -> Thinking:
    usage = inference.Usage(prompt_tokens=9, completion_tokens=1, thinking_tokens=2)
    return Thinking(
        Event(thought=inference.Thought(chunk=0, ids=[1, 2], text="a dog")),
        Event(thought=inference.Thought(chunk=1)),
        Event(tokens=inference.Tokens(ids=[7], text=" can")),
        Event(thought=inference.Thought(chunk=2, ids=[3, 4], text="")),
        *ended(common.FINISH_REASON_LENGTH, usage=usage),
    )


def test_thoughts_are_shown_as_they_come(capsys):
    stream = thinking()
    stream_answer(stream, "x", {"n": 1}, {"thoughts", "tokens"}, as_json=False)  # type: ignore[arg-type]
    assert stream.asked == {"n": 1, "thoughts": True}
    out, err = capsys.readouterr()
    assert err == "chunk 0: a dog\nchunk 1: -\n\nchunk 2: 3 4\n"
    assert out.startswith(" can\ntokens    1 (7)")
    assert "thoughts  2 tokens" in out


def test_thoughts_are_in_the_json(capsys):
    stream_answer(thinking(), "x", {}, {"thoughts"}, as_json=True)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    (choice,), usage = json.loads(out)["choices"], json.loads(out)["usage"]
    assert choice["thoughts"][:2] == [
        {"chunk": 0, "token_ids": [1, 2], "text": "a dog"},
        {"chunk": 1, "token_ids": [], "text": ""},
    ]
    assert (usage["thinking_tokens"], err) == (2, "")


def kv_stream(lengths: str) -> Thinking:
    spans = [
        common.Span(name="compute", process="p-0", attributes={"kv_lengths": "2 4"}, attempt=1),
        common.Span(name="decode", process="d-0", attributes={"kv_lengths": lengths}, attempt=1),
        common.Span(name="push", process="p-0"),
    ]
    both = inference.Tokens(ids=[8, 9], text=" vary widely", lengths=[5, 7])
    setattr(both, "from", 1)  # a keyword in Python
    usage = inference.Usage(prompt_tokens=4)
    end = ended(common.FINISH_REASON_EOS, usage=usage, spans=spans)
    return Thinking(Event(tokens=inference.Tokens(ids=[7], text=" can")), Event(tokens=both), *end)


def test_kv_lengths_are_those_of_the_workers(capsys):
    stream = kv_stream("5-7")
    stream_answer(stream, "x", {}, {"kv"}, as_json=False)  # type: ignore[arg-type]
    assert stream.asked == {"kv_lengths": True}
    assert capsys.readouterr().out.splitlines()[1:] == [
        "kv        2 on p-0: a part of the prompt",
        "kv        4 on p-0: token 7 ' can'",
        "kv        5 on d-0: token 8 ' vary'",
        "kv        6 on d-0: token 9 ' widely'",
        "kv        7 on d-0: end, eos",
    ]
    stream_answer(kv_stream("5-7"), "x", {}, {"kv"}, as_json=True)  # type: ignore[arg-type]
    steps = json.loads(capsys.readouterr().out)["kv"]
    assert [(step["worker"], step["length"]) for step in steps] == [("p-0", 2), ("p-0", 4)] + [
        ("d-0", length) for length in (5, 6, 7)
    ]
    with pytest.raises(EngineFault, match="kv_lengths: must be numbers and ranges of them, got '5-x'"):
        stream_answer(kv_stream("5-x"), "x", {}, {"kv"}, as_json=False)  # type: ignore[arg-type]


def test_a_receipt_that_cannot_be_written_is_an_error_of_its_option(tmp_path, monkeypatch):
    monkeypatch.setattr("baton.receipts.form.with_prompt", lambda *_: "a receipt")
    for file in (tmp_path / "missing" / "r.json", tmp_path):
        stream: Any = thinking()
        stream.tokenize = lambda text: [1]
        with pytest.raises(ConfigError, match=f"^--receipt: cannot write {file}: (No such file|Is a directory)"):
            stream_answer(stream, "x", {}, set(), receipt=file, as_json=False)


def test_thinking_while_decoding_is_an_option(monkeypatch):
    asked: list[object] = []
    monkeypatch.setattr(command, "stream_answer", lambda *args, **_: asked.append(args[2]["think_while_decoding"]))
    for given in ([], ["--think-while-decoding"], ["--no-think-while-decoding"]):
        done = CliRunner().invoke(app, ["generate", "x", "--target", "127.0.0.1:1", *given])
        assert done.exit_code == 0, done.output
    assert asked == [None, True, False]


@pytest.mark.parametrize(("data", "text"), [("Zoë".encode(), "Zoë"), (b"a\xff", "a\udcff")])
def test_a_prompt_on_standard_input_need_not_be_text(monkeypatch, data, text):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    stream = thinking()
    stream_answer(stream, "-", {}, set(), as_json=False)  # type: ignore[arg-type]
    assert stream.prompt == text


def add_cluster(name, grpc="127.0.0.1:1"):
    folder = StateFolder(name)
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.write_state(ClusterState(name, ProcessId.of(os.getpid()), grpc, grpc, grpc, "redis://x", "none"))


def test_the_only_cluster_is_meant_when_none_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    add_cluster("a", grpc="")
    assert target.find_cluster(None, starting=True).name == "a"
    with pytest.raises(NoWorker, match="'a' is still starting"):
        target.find_cluster("a")
    add_cluster("a")
    assert target.find_cluster(None).name == "a"
    add_cluster("b")
    assert target.find_cluster("b").name == "b"
    with pytest.raises(NoWorker, match=r"several clusters are running; set --name to one of: a, b"):
        target.find_cluster(None)
    with pytest.raises(NoWorker, match="no cluster named 'c'"):
        target.find_cluster("c")


@pytest.mark.parametrize(
    ("reason", "matched", "shown"),
    [("eos", "0", 0), ("eos", "", None), ("stop_token", "7", 7), ("stop_string", "0", "0"), ("length", "", None)],
)
def test_json_has_numbers_for_numbers(reason, matched, shown):
    ended_by = common.FinishReason.Value(f"FINISH_REASON_{reason.upper()}")
    span = common.Span(name="push", attributes={"kv_bytes": "4096", "transport": "shm", "exposed_s": "0.5", "id": "01"})
    finished = Event(finished=inference.Finished(reason=ended_by, matched_stop=matched))
    stream = Thinking(finished, Event(completed=inference.Completed(spans=[span])))
    list(stream)
    tree = json.loads(json.dumps(command.plain(stream.collect())))
    assert tree["choices"][0]["matched_stop"] == shown
    assert tree["trace"][0]["attributes"] == {"kv_bytes": 4096, "transport": "shm", "exposed_s": 0.5, "id": "01"}
