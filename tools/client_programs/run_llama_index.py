from check import KEY, MODEL, V1, check
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

same = {"model": MODEL, "api_base": V1, "api_key": KEY, "max_tokens": 8}
ask = [ChatMessage(role="user", content="The capital of France is")]


@check("completion")
def _():
    return OpenAILike(**same).complete("The color of dog").text


@check("chat")
def _():
    return OpenAILike(is_chat_model=True, **same).chat(ask).message.content


@check("stream")
def _():
    return list(OpenAILike(is_chat_model=True, **same).stream_chat(ask))[-1].message.content
