"""One request in one process: the plain run that every distributed one must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from baton.core import HandoffId
from baton.errors import EngineFault

if TYPE_CHECKING:
    from baton.core import Finish, SequenceSpec, Token
    from baton.engine.engine import Engine


class Generation(NamedTuple):
    """New tokens, their text (tail included) and how the choice ended."""

    tokens: list[Token]
    text: str
    finish: Finish


def generate(engine: Engine, spec: SequenceSpec) -> Generation:
    """Run `spec` to its end on an otherwise idle engine.

    Raises InvalidRequest if it can never be computed, EngineFault if the engine failed on it or cannot go on.
    """
    key, tokens = HandoffId("generate", 0), list["Token"]()
    engine.submit(key, spec)
    while True:
        result = engine.step()
        if result.failed:
            raise result.failed[0][1]
        if not (result.computed or result.outputs):
            engine.release(key)
            raise EngineFault("no room in the block pool: other holders have it")
        for output in result.outputs:
            tokens += output.tokens
            if output.finish is not None:
                return Generation(tokens, "".join(t.text for t in tokens) + output.finish.tail, output.finish)
