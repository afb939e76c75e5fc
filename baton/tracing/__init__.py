"""Where the time of one request went, in all processes: spans, and the forms in which they leave."""
