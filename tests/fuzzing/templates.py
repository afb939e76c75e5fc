"""Chat templates of models: compiled and rendered within their bounds, or rejected."""

import re
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from baton.limits import MAX_RENDERED_CHARS
from router.parsing.chat_template import Template, TemplateFailed
from tests.fuzzing.common import FREELY, ROOT, Target, outcome

_TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<b>", "tool_calls": []}]
_VARIABLES = {"messages": _TURNS, "tools": None, "add_generation_prompt": True, "bos_token": "<s>", "n": 3}
_PIECES = """
    {{ }} {% %} {%- -%} {# #} {%raw%} {%endraw%} text ( ) [ ] : , = + - * ** // % ~ == in not is and if else
    {%for·m·in·messages%} {%for·i·in·range(9)%} {%endfor%} {%if·n%} {%elif·m%} {%else%} {%endif%}
    {%set·x= {%set·x%} {%endset%} {%set·ns=namespace(a=1)%} {%set·ns.a= {%with·a=1%} {%endwith%}
    {%macro·f(a,·b=1)%} {%endmacro%} {{f(1)}} {%call·f(1)%} {%call·f(2)%} {%endcall%} caller() recursive f( b=2
    {%generation%} {%endgeneration%} {%filter·upper%} {%endfilter%} {%autoescape·true%} {%endautoescape%} {%break%}
    {%continue%} {%do·x%} {%block·b%} {%endblock%}
    m m.content m['role'] messages n loop.index0 loop( range(9) x self ''.__class__ raise_exception('no') none true
    strftime_now('%d·%b') 'text' "%s" [1,·2] {'a':·1} 7 999 1.5 1e9 defined string .x [0] [::-1] .items() .split('·')
    |tojson |trim |join(',') |length |list |replace('a','bb') |map('upper') |selectattr('role') |groupby('role') |first
    |batch(2) |indent |format(1) |int |float |sort |sum |wordwrap(2) |attr('x') |default(1) |unique |urlize |center(9)
    {%extends·'x'%} {%include·'x'%} {%import·'x'·as·y%} {%from·'x'·import·y%} startswith('h') namespace(a=1) cycler(1)
""".split()


def from_text(source: str) -> None:
    """The clock advances at each read, so that an endless loop ends immediately."""
    clock = map((0.001).__mul__, count()).__next__
    written, error = outcome(lambda: Template(source, clock=clock).render(_VARIABLES), TemplateFailed)
    assert str(error) if written is None else len(written) <= MAX_RENDERED_CHARS


def from_bytes(data: bytes) -> None:
    """Test the bytes as text. Large numbers are skipped, because a template's memory is not bounded."""
    source = data.decode("utf-8", "replace")
    if not re.search(r"[0-9_]{5}", source):
        from_text(source)


@FREELY
@given(st.lists(st.sampled_from(_PIECES), max_size=24))
def drawn(pieces):
    from_text(" ".join(pieces).replace("·", " "))


_FILES = sorted((ROOT / "tests/unit/router/templates").glob("*.jinja"))
_WRONG = [b"{%for a in b%}" * 25 + b"{%endfor%}" * 25, b"{% break %}", b"{{ f(a=1, a=2) }}", b"{{ 'a' * n ** 99 }}"]
TEMPLATE = Target(from_bytes, drawn, [path.read_bytes() for path in _FILES] + _WRONG)
