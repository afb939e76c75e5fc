"""`baton top`, a live terminal view. Read `feed.py` (messages of routers) first, then `render.py` (messages to text)
and `app.py` (the Textual screen).
"""
