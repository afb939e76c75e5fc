from check import KEY, MODEL, V1, check
from guidance import assistant, gen, models, user


def answer(model, **what):
    with user():
        model += "The capital of France is"
    with assistant():
        model += gen("found", max_tokens=8, **what)
    return model["found"]


@check("models.OpenAI")
def _():
    return answer(models.OpenAI(MODEL, base_url=V1, api_key=KEY, echo=False))


@check("VLLMModel: regex")
def _():
    from guidance.models.experimental import VLLMModel

    return answer(VLLMModel(MODEL, base_url=V1, api_key=KEY, echo=False), regex="[A-Z][a-z]{3,5}").istitle()
