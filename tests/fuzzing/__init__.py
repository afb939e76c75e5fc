"""What must hold for whatever arrives: a value that the next in line can use, or an error that names what is wrong.

A target reads bytes as they come over the wire, or what hypothesis draws. None of them starts a process or a thread.
`tools/fuzz_parse.py` searches them, led by coverage; `tests/unit/test_fuzzing.py` calls them briefly.
"""
