"""`baton plan`: its output and its errors. The simulation is fake."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.app import app
from baton.cli.exit_codes import exit_code
from baton.cli.sizing import planning as command
from baton.cli.sizing.planning import WhatIf, parse_what_if, verdict
from baton.errors import ConfigError
from baton.planner.search import Answer, Shape, Tried
from baton.planner.sim.scenario import Death, Slow, SlowLink
from baton.planner.sim.stats import Report
from tests.unit.plan.plan_support import Fake, profile

LOAD = ("--rate", "20", "--prompt-tokens", "100", "--max-tokens", "11", "--arrivals", "constant", "--requests", "50")


@pytest.fixture
def fake(monkeypatch):
    found = Fake(10, 20, 4)
    monkeypatch.setattr(command, "simulate", found)
    monkeypatch.setattr(command, "configure_logging", lambda *_: None)  # would change other tests' logs
    return found


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(profile().model_dump_json())
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, args)])


def planned(*args: object) -> dict:
    done = run(*args, "--json")
    assert done.exception is None, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("colocated", "gpus", "said"),
    [
        (4, 16, "disaggregation pays: 3 GPUs against 5"),
        (10, 16, "disaggregation does not pay here: 3 GPUs against 2"),
        (4, 2, "no layout of up to 2 GPUs keeps 90% of requests within the goal"),
    ],
)
def test_the_verdict_and_the_source_are_printed(fake, file, colocated, gpus, said):
    fake.colocated = colocated
    done = run("--profile", file, *LOAD, "--gpus-at-most", gpus)
    assert done.exit_code == 0
    assert "source: made up" in done.stdout
    assert said in done.stdout


def test_json_has_the_plan_and_all_that_was_tried(fake, file):
    found = planned("--profile", file, *LOAD)
    assert (found["best"]["prefill"], found["best"]["decode"], found["best"]["kind"]) == (2, 1, "disaggregated")
    assert found["colocated"]["decode"] == 5
    assert len(found["tried"]) == len(fake.asked)
    assert found["best"]["report"]["arrivals"] > 0


def test_the_cluster_file_says_goals_pools_and_bounds_and_is_tried_as_it_is(fake, file, tmp_path):
    cluster = tmp_path / "c.yaml"
    cluster.write_text(
        "model: {path: oracle}\nslo: {ttft_ms: 300, itl_ms: 30}\nprefill: {replicas: 3, block_size: 256}\n"
        "decode: {max_running: 9, block_size: 32}\nrouter: {local_prefill: never, queue: {max_requests: 5}}\n"
    )
    found = planned("--profile", file, *LOAD, "-c", cluster, "--set", "decode.replicas=2", "--ttft-ms", 250)
    assert (found["slo"]["ttft_s"], found["slo"]["itl_s"]) == (0.25, 0.03)
    first = fake.asked[0]
    assert (first.prefill.workers, first.decode.workers) == (3, 2)
    assert (first.prefill.block_size, first.decode.max_running) == (32, 9)
    assert (first.router.max_requests, first.router.local_prefill) == (5, False)
    assert found["tried"][0]["why"] == "the file"


@pytest.mark.parametrize("key", ["level", "dtype", "quantize"])
def test_a_profile_of_other_kernels_or_weights_is_rejected_by_name(fake, tmp_path, monkeypatch, key):
    path, cluster = tmp_path / "p.json", tmp_path / "c.yaml"
    kind = {"level": "avx2", "dtype": "bfloat16", "quantize": "int8"}
    path.write_text(profile(**kind).model_dump_json())
    cluster.write_text("model: {path: oracle, quantize: int8}\n")
    monkeypatch.delenv("BATON_CPU_LEVEL", raising=False)
    assert planned("--profile", path, *LOAD, "-c", cluster)["tried"]
    assert "made up" in run("--profile", path, *LOAD).stdout
    assert "h, avx2 bfloat16 int8\n" in run("--profile", path, *LOAD).stdout
    monkeypatch.setenv("BATON_CPU_LEVEL", "avx512" if key == "level" else "avx2")
    sets = {"level": (), "dtype": ("model.dtype=float32",), "quantize": ("model.quantize=int4",)}[key]
    done = run("--profile", path, *LOAD, "-c", cluster, *(word for one in sets for word in ("--set", one)))
    assert re.search(
        rf"--profile: easy has {key} {kind[key]}, but workers of the file have {key} ", str(done.exception)
    )


def test_what_if_simulates_one_layout_at_its_share_of_the_load(fake, file):
    found = planned("--profile", file, *LOAD, "--what-if", "prefill=1,decode=1,workers=100,fault=death:decode-3@2")
    (asked,) = fake.asked
    assert (asked.prefill.workers, asked.decode.workers, asked.faults[0].worker) == (50, 50, "decode-3")
    assert (found["rate"], found["gpus"]) == (1000.0, 100)
    done = run("--profile", file, *LOAD, "--what-if", "colocated=2")
    assert done.stdout.startswith("2 colocated (tp 1, chunks of 2048): 2 GPUs, 20 requests/s")
    assert fake.asked[-1].decode.max_batched_tokens == 2048
    assert planned("--profile", file, *LOAD, "--what-if", "colocated=2")["shape"]["chunk"] == 2048


def test_a_trace_gives_the_rate_and_lengths(fake, file, tmp_path):
    trace = timed(tmp_path / "t.jsonl")
    assert planned("--profile", file, "--trace", trace, "--requests", 50)["rate"] == pytest.approx(2.0)
    scaled = planned("--profile", file, "--trace", trace, "--requests", 50, "--rate", 8, "--scale", 2)
    assert scaled["rate"] == 8
    assert planned("--profile", file, "--trace", timed(trace, prompt=[1, 2], prompt_tokens=None))["rate"] > 1
    untimed = timed(tmp_path / "u.jsonl", timestamp=None)
    assert planned("--profile", file, "--trace", untimed, "--rate", 2, "--arrivals", "constant")["rate"] == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--rate", "0"), "rate: must be requests per second, a number above 0, got 0"),
        ((), "--rate: must be given"),
        (("--rate", "1", "--max-tokens", "0"), "max_tokens: must be"),
        (("--rate", "1", "--attainment", "1.5"), "--attainment: must be a share .* got 1.5"),
        (("--rate", "1", "--ttft-ms", "-3"), "--ttft-ms: must be milliseconds, .* got -3"),
        (("--rate", "1", "--itl-ms", "nan"), "--itl-ms: must be milliseconds, .* got nan"),
        (("--rate", "1", "--what-if", "prefill=1,tp=3"), "tensor_parallel: profile easy has 1, got 3"),
        (("--rate", "1", "--set", "decode.replicas=2"), "--set: must be left out .* got 'decode.replicas=2'"),
        (("--rate", "1", "--scale", "2"), "--scale: must be left out without a trace, .* got 2"),
        (("--rate", "1", "--every", "2"), "--every: must be left out without a trace, got 2"),
        (("--rate", "1", "--trace", "/nowhere"), "--trace: cannot read /nowhere"),
        (("--trace", "TIMED", "--arrivals", "never"), "arrivals: must be poisson, .* got 'never'"),
        (("--trace", "TIMED", "--arrivals", "constant"), "--arrivals: must be left out with a trace that has times"),
        (("--rate", "1", "--profile", "opt-14b"), "opt-13b-a100, .*'opt-14b'"),
        (("--trace", "TEXT"), r"--trace: must have prompt_tokens or token ids .* got text in .*TEXT"),
    ],
)
def test_mistakes_are_named(fake, file, tmp_path, monkeypatch, args, says):
    monkeypatch.chdir(tmp_path)
    timed(tmp_path / "TIMED")
    timed(tmp_path / "TEXT", prompt="hello", prompt_tokens=None)
    done = run("--profile", file, *args)
    assert isinstance(done.exception, ConfigError)
    assert exit_code(done.exception) == 3
    assert re.search(says, str(done.exception))


def timed(path: Path, **more: object) -> Path:
    """Write a trace of two requests per second. `more` are fields of all; None omits one."""
    given: dict[str, object] = {"timestamp": 0, "max_tokens": 11, "prompt_tokens": 100} | more
    one = {key: value for key, value in given.items() if value is not None}
    lines = [one | ({"timestamp": 500 * number} if "timestamp" in one else {}) for number in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_that_the_files_own_layout_is_not_tried_is_said(fake, file, tmp_path):
    (tmp_path / "c.yaml").write_text("model: {path: oracle}\ndecode: {tensor_parallel: 2}\n")
    done = run("--profile", file, *LOAD, "-c", tmp_path / "c.yaml")
    layout = "1 prefill (tp 1) + 1 decode (tp 2)"
    assert f"not tried: the file's layout {layout}, because profile easy has only tp 1" in done.stderr
    assert "the file" not in done.stdout
    assert run("--rate", "1").exit_code == run("--profile", file, *LOAD, "--gpus-at-most", 0).exit_code == 2, "usage"


def compared(apart: Shape, together: Shape, **facts: object) -> list[str]:
    report = Report(arrivals=1, good=1)
    tried = Tried(apart, 1.0, report, True, "pair"), Tried(together, 1.0, report, True, "colocated")
    answer = Answer(1.0, *tried, {"disaggregated": 1.5, "colocated": 2.0}, (), **facts)  # type: ignore[arg-type]
    return verdict(answer, 8, 0.9)


@pytest.mark.parametrize(("apart", "together", "said"), [(3, 4, True), (3, 3, False)])
def test_fewer_gpus_with_less_goodput_each_are_cheaper_all_the_same(apart, together, said):
    lines = compared(Shape(1, apart - 1), Shape(together))
    assert lines[0].startswith("disaggregation pays: 3 GPUs against 4" if said else "disaggregation does not pay")
    assert lines[-1].endswith("(at this load it is still cheaper)") == said
    assert "0.75 times the goodput" in lines[-1]


def test_a_goodput_without_a_limit_is_not_compared():
    lines = compared(Shape(1, 1), Shape(1), at_least=frozenset({"colocated"}))
    assert lines[0] == "disaggregation does not pay here: 2 GPUs against 1"
    assert lines[1].endswith("2 GPUs; up to 1.5 requests/s for each GPU")
    assert lines[2].endswith("1 GPUs; with so few requests no limit was found, at least 2 requests/s for each GPU")
    assert lines[3:] == []


# --- values of `--what-if`

OWN = Shape(3, 2, 4, 1)
FAULTS = Death(10, "prefill-0"), Slow(5, 9.5, "decode-2", 3), SlowLink(1, 2, "", 0.1)


@pytest.mark.parametrize(
    ("text", "own", "expected"),
    [
        ("prefill=5", OWN, WhatIf(Shape(3, 5, 4, 1))),
        ("decode=7,decode_tp=2", OWN, WhatIf(Shape(7, 2, 2, 1))),
        ("prefill=1,decode=1,tp=2", OWN, WhatIf(Shape(1, 1, 2, 2))),
        ("colocated=4,chunk=512", OWN, WhatIf(Shape(4, 0, 4, 1, 512))),
        ("colocated=4,tp=1", OWN, WhatIf(Shape(4))),
        ("prefill=2,prefill_tp=2", Shape(3, chunk=256), WhatIf(Shape(3, 2, 1, 2))),
        ("prefill=1,decode=3,workers=10000", Shape(1, 1), WhatIf(Shape(7500, 2500), scale=2500)),
        ("fault=death:prefill-0@10,fault=slow:decode-2@5-9.5x3,fault=link:@1-2x0.1", OWN, WhatIf(OWN, FAULTS)),
    ],
)
def test_a_layout_differs_from_the_files_in_what_is_named(text, own, expected):
    assert parse_what_if(text, own) == expected


def test_fewer_workers_than_pools_become_one_of_each():
    assert Shape(1, 9).of(2) == Shape(1, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefil=2", r"--what-if: must be KEY=VALUE,\.\.\. with prefill, .* got 'prefil=2'"),
        ("prefill=0", r"--what-if: prefill: must be a whole number above 0, got '0'"),
        ("prefill=2,chunk=256", r"chunk: must be left out without colocated workers, got 256"),
        ("prefill_tp=2", r"prefill_tp: must be left out, colocated workers have decode_tp, got 2"),
        ("prefill=2,workers=1", r"workers: must be 2 or more, .* got 1"),
        (
            "colocated=1,prefill=2",
            r"colocated: must be given without prefill, decode and prefill_tp, got 'colocated=1,prefill=2'",
        ),
        ("fault=death:@1", r"fault: must be death:WORKER@SECONDS.* got 'death:@1'"),
        ("fault=death:decode-0@1-2x3", r"fault: must be"),
        ("fault=slow:decode-0@5-4x2", r"fault: must be"),
        ("fault=link:@1-2x0", r"fault: must be"),
        ("fault=crash:decode-0@5", r"fault: must be"),
    ],
)
def test_what_cannot_be_is_refused_by_key(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_what_if(text, Shape(3, chunk=256) if text == "prefill_tp=2" else OWN)
