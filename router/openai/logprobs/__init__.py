"""Log-probabilities in answers: texts and bytes of tokens (`tokens.py`), and prompts that come back (`prompt.py`)."""
