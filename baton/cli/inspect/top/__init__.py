"""`baton top`: `feed.py` receives routers' messages, `render.py` formats them, and `app.py` is the screen."""
