import litellm
from check import KEY, MODEL, V1, check

ask = [{"role": "user", "content": "The capital of France is"}]
same = {"api_base": V1, "api_key": KEY, "max_tokens": 8}


@check("openai/")
def _():
    return litellm.completion(f"openai/{MODEL}", ask, **same).choices[0].message.content


@check("hosted_vllm/")
def _():
    return litellm.completion(f"hosted_vllm/{MODEL}", ask, **same).choices[0].message.content


@check("stream")
def _():
    return "".join(
        c.choices[0].delta.content or "" for c in litellm.completion(f"openai/{MODEL}", ask, stream=True, **same)
    )


@check("text-completion-openai/")
def _():
    return litellm.text_completion("The color of dog", f"text-completion-openai/{MODEL}", **same).choices[0].text


@check("ContextWindowExceededError")
def _():
    try:
        litellm.completion(f"openai/{MODEL}", [{"role": "user", "content": "dog " * 4000}], **same)
    except litellm.ContextWindowExceededError:
        return True
    return False


@check("responses")
def _():
    return litellm.responses("The capital of France is", f"openai/{MODEL}", api_base=V1, api_key=KEY).output
