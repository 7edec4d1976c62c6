"""Clients of the matrix that are Python libraries, each used by its own interface.

    python python_clients.py CLIENT

Writes a JSON line for each scenario: its name, and the ``answer`` or the ``error``. Environment: ``MMROUTER_URL``,
``MMROUTER_KEY``, ``MMROUTER_MODEL``, and ``MMROUTER_IMAGE``, a PNG file. Runs in the environment of ``hack/clients``.
"""

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

URL, KEY, MODEL = (os.environ[f"MMROUTER_{name}"] for name in ("URL", "KEY", "MODEL"))
BASE = f"{URL}/v1"
PNG = Path(os.environ["MMROUTER_IMAGE"]).read_bytes()
ENCODED = base64.b64encode(PNG).decode()
DATA_URI = f"data:image/png;base64,{ENCODED}"
TEXT, ABOUT_IMAGE, STORY = "Say hello.", "What is this?", "Tell a story of the sea."
SHORT, LONG = 8, 400
RETRIES = 20
GREEDY = {"temperature": 0}
COLORS = ("red", "green")
SCHEMA = {
    "title": "paint",
    "type": "object",
    "properties": {"color": {"type": "string", "enum": list(COLORS)}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": SCHEMA}}
CHOICE = {"type": "function", "function": {"name": "paint"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def pictured() -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": ABOUT_IMAGE}, {"type": "image_url", "image_url": {"url": DATA_URI}}]
    return [{"role": "user", "content": parts}]


class ChatCompletions:
    """Scenarios of a library whose answers have the form of OpenAI's chat completions."""

    def ask(self, messages: list[dict[str, Any]], **fields: Any) -> Any:
        raise TypeError("a client sends the request by its library")

    def chat(self) -> Any:
        answer = self.ask(said(TEXT))
        return [answer.choices[0].message.content, answer.usage.total_tokens]

    def stream(self) -> Any:
        chunks = self.ask(said(TEXT), stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def image(self) -> Any:
        return self.ask(pictured()).choices[0].message.content

    def tools(self) -> Any:
        call = self.ask(said(TEXT), tools=[TOOL], tool_choice=CHOICE, max_tokens=LONG).choices[0].message.tool_calls[0]
        arguments = call.function.arguments
        return [call.function.name, json.loads(arguments) if isinstance(arguments, str) else arguments]

    def cancel(self) -> Any:
        stream = self.ask(said(STORY), stream=True, max_tokens=LONG)
        first = next(stream)
        stream.close()
        return bool(first.choices)


class OpenAI(ChatCompletions):
    def __init__(self) -> None:
        import openai

        self.client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=RETRIES)

    def ask(self, messages: list[dict[str, Any]], **fields: Any) -> Any:
        fields = {"max_tokens": SHORT, "temperature": 0, **fields}
        return self.client.chat.completions.create(model=MODEL, messages=messages, **fields)

    def stream(self) -> Any:
        chunks = list(self.ask(said(TEXT), stream=True, stream_options={"include_usage": True}))
        return ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks[-1].usage.total_tokens]

    def structured(self) -> Any:
        return json.loads(self.ask(said(TEXT), response_format=FORMAT, max_tokens=LONG).choices[0].message.content)

    def responses(self) -> Any:
        return self.client.responses.create(model=MODEL, input=TEXT, max_output_tokens=SHORT, temperature=0).output_text

    def completion(self) -> Any:
        made = self.client.completions.create(model=MODEL, prompt=TEXT, max_tokens=SHORT, temperature=0)
        return made.choices[0].text

    def models(self) -> Any:
        return MODEL in [model.id for model in self.client.models.list()]

    def cancel(self) -> Any:
        with self.ask(said(STORY), stream=True, max_tokens=LONG) as stream:
            return bool(next(iter(stream)).choices)


def tokens(usage: Any) -> int:
    """Return all tokens of an answer in Anthropic's form, whose ``input_tokens`` exclude those of the cache."""
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + cached + usage.output_tokens


class Anthropic:
    def __init__(self) -> None:
        import anthropic

        self.client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=RETRIES)

    def fields(self, content: Any, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return {"model": MODEL, "messages": messages, "max_tokens": SHORT, "extra_body": GREEDY, **more}

    def chat(self) -> Any:
        answer = self.client.messages.create(**self.fields(TEXT))
        return [answer.content[0].text, tokens(answer.usage)]

    def stream(self) -> Any:
        with self.client.messages.stream(**self.fields(TEXT)) as stream:
            text, usage = "".join(stream.text_stream), stream.get_final_message().usage
        return [text, tokens(usage)]

    def image(self) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": ENCODED}
        content = [{"type": "text", "text": ABOUT_IMAGE}, {"type": "image", "source": source}]
        return self.client.messages.create(**self.fields(content)).content[0].text

    def tools(self) -> Any:
        tool = {"name": "paint", "description": "Paint it.", "input_schema": SCHEMA}
        fields = self.fields(TEXT, tools=[tool], tool_choice={"type": "tool", "name": "paint"}, max_tokens=LONG)
        [use] = [block for block in self.client.messages.create(**fields).content if block.type == "tool_use"]
        return [use.name, use.input]

    def structured(self) -> Any:
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = self.client.messages.create(**self.fields(TEXT, output_config=form, max_tokens=LONG))
        return json.loads(answer.content[0].text)

    def count(self) -> Any:
        fields = {name: value for name, value in self.fields(TEXT).items() if name in ("model", "messages")}
        return self.client.messages.count_tokens(**fields).input_tokens

    def cancel(self) -> Any:
        with self.client.messages.stream(**self.fields(STORY, max_tokens=LONG)) as stream:
            return bool(next(iter(stream.text_stream)) is not None)


class LangChain:
    def __init__(self) -> None:
        from langchain_core.messages import HumanMessage
        from langchain_openai import ChatOpenAI

        self.message, limits = HumanMessage, {"max_tokens": SHORT, "temperature": 0, "max_retries": RETRIES}
        self.model = ChatOpenAI(base_url=BASE, api_key=KEY, model=MODEL, **limits)
        self.longer = ChatOpenAI(base_url=BASE, api_key=KEY, model=MODEL, **{**limits, "max_tokens": LONG})

    def chat(self) -> Any:
        answer = self.model.invoke(TEXT)
        return [answer.content, answer.usage_metadata["total_tokens"]]

    def stream(self) -> Any:
        return "".join(chunk.content for chunk in self.model.stream(TEXT))

    def image(self) -> Any:
        return self.model.invoke([self.message(pictured()[0]["content"])]).content

    def tools(self) -> Any:
        [call] = self.longer.bind_tools([TOOL], tool_choice="paint").invoke(TEXT).tool_calls
        return [call["name"], call["args"]]

    def structured(self) -> Any:
        return self.longer.with_structured_output(SCHEMA, method="json_schema").invoke(TEXT)

    def cancel(self) -> Any:
        stream = self.longer.stream(STORY)
        first = next(stream)
        stream.close()
        return first is not None


class LiteLLM(ChatCompletions):
    def __init__(self) -> None:
        import litellm

        self.complete = litellm.completion

    def ask(self, messages: list[dict[str, Any]], **fields: Any) -> Any:
        fields = {"max_tokens": SHORT, "temperature": 0, "max_retries": RETRIES, **fields}
        return self.complete(model=f"openai/{MODEL}", api_base=BASE, api_key=KEY, messages=messages, **fields)

    def structured(self) -> Any:
        return json.loads(self.ask(said(TEXT), response_format=FORMAT, max_tokens=LONG).choices[0].message.content)


class LlamaIndex:
    def __init__(self) -> None:
        from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
        from llama_index.llms.openai_like import OpenAILike

        self.message, self.parts = ChatMessage, [TextBlock(text=ABOUT_IMAGE), ImageBlock(image=PNG)]
        limits = {"max_tokens": SHORT, "temperature": 0, "max_retries": RETRIES}
        common = {"model": MODEL, "api_base": BASE, "api_key": KEY, "is_chat_model": True}
        self.model = OpenAILike(**common, **limits)
        able = {"is_function_calling_model": True, "should_use_structured_outputs": True}
        self.longer = OpenAILike(**common, **{**limits, "max_tokens": LONG}, **able)

    def chat(self) -> Any:
        return self.model.chat([self.message(content=TEXT)]).message.content

    def stream(self) -> Any:
        return "".join(chunk.delta or "" for chunk in self.model.stream_chat([self.message(content=TEXT)]))

    def image(self) -> Any:
        return self.model.chat([self.message(role="user", blocks=self.parts)]).message.content

    def tools(self) -> Any:
        from llama_index.core.tools import FunctionTool

        def paint(color: Literal["red", "green"]) -> str:
            """Paint it."""
            return color

        answer = self.longer.chat_with_tools([FunctionTool.from_defaults(paint)], TEXT, tool_required=True)
        [call] = self.longer.get_tool_calls_from_response(answer)
        return [call.tool_name, call.tool_kwargs]

    def structured(self) -> Any:
        from llama_index.core import PromptTemplate
        from pydantic import BaseModel

        class Paint(BaseModel):
            color: Literal["red", "green"]

        return self.longer.structured_predict(Paint, PromptTemplate(TEXT)).model_dump()

    def cancel(self) -> Any:
        stream = self.longer.stream_chat([self.message(content=STORY)])
        first = next(stream)
        stream.close()
        return first is not None


class PydanticAI:
    def __init__(self) -> None:
        import openai
        from pydantic import BaseModel
        from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        class Paint(BaseModel):
            color: Literal["red", "green"]

        client = openai.AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=RETRIES)
        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
        settings = {"max_tokens": SHORT, "temperature": 0}
        longer = {"max_tokens": LONG, "temperature": 0}
        self.agent = Agent(model, model_settings=settings)
        self.longer = Agent(model, model_settings=longer)
        self.native = Agent(model, model_settings=longer, output_type=NativeOutput(Paint, name="paint"))
        self.by_tool = Agent(model, model_settings=longer, output_type=ToolOutput(Paint, name="paint"))
        self.picture = BinaryContent(data=PNG, media_type="image/png")

    def chat(self) -> Any:
        result = self.agent.run_sync(TEXT)
        return [result.output, result.usage.total_tokens]

    def stream(self) -> Any:
        return self.agent.run_stream_sync(TEXT).get_output()

    def image(self) -> Any:
        return self.agent.run_sync([ABOUT_IMAGE, self.picture]).output

    def tools(self) -> Any:
        return self.by_tool.run_sync(TEXT).output.model_dump()

    def structured(self) -> Any:
        return self.native.run_sync(TEXT).output.model_dump()

    def cancel(self) -> Any:
        async def leave() -> bool:
            async with self.longer.run_stream(STORY) as result:
                async for text in result.stream_text(delta=True):
                    return text is not None
            return False

        return asyncio.run(leave())


class Instructor:
    def __init__(self) -> None:
        import instructor
        import openai
        from pydantic import BaseModel

        class Paint(BaseModel):
            color: Literal["red", "green"]

        self.paint, client = Paint, openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=RETRIES)
        self.by_tool = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        self.by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)

        self.fields = {"model": MODEL, "max_tokens": LONG, "temperature": 0, "max_retries": 1}

    def ask(self, client: Any, messages: list[dict[str, Any]]) -> Any:
        return client.chat.completions.create(messages=messages, response_model=self.paint, **self.fields).model_dump()

    def stream(self) -> Any:
        partial = self.by_schema.chat.completions.create_partial
        *_, last = partial(messages=said(TEXT), response_model=self.paint, **self.fields)
        return last.model_dump()

    def image(self) -> Any:
        return self.ask(self.by_schema, pictured())

    def tools(self) -> Any:
        return self.ask(self.by_tool, said(TEXT))

    def structured(self) -> Any:
        return self.ask(self.by_schema, said(TEXT))


class HuggingFaceHub(ChatCompletions):
    def __init__(self) -> None:
        from huggingface_hub import InferenceClient

        self.client = InferenceClient(base_url=BASE, api_key=KEY)

    def ask(self, messages: list[dict[str, Any]], **fields: Any) -> Any:
        return self.client.chat_completion(messages, model=MODEL, **{"max_tokens": SHORT, "temperature": 0, **fields})


CLIENTS = {
    "openai": OpenAI,
    "anthropic": Anthropic,
    "langchain": LangChain,
    "litellm": LiteLLM,
    "llama-index": LlamaIndex,
    "pydantic-ai": PydanticAI,
    "instructor": Instructor,
    "huggingface-hub": HuggingFaceHub,
}


def main(name: str) -> None:
    client = CLIENTS[name]()
    scenarios = [scenario for scenario in os.environ["MMROUTER_SCENARIOS"].split() if hasattr(client, scenario)]
    for scenario in scenarios:
        try:
            result = {"answer": getattr(client, scenario)()}
        except Exception as error:  # each library has its own
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"scenario": scenario, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
