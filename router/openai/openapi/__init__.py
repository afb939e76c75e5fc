"""The description of the HTTP API: `/openapi.json` (`spec.py`), and `/docs`, the same as a page (`page.py`)."""
