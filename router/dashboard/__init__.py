"""The live dashboard. `app` serves the page and its data; `static/main.js` is the entry of the page."""
